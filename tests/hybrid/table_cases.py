"""Memories of layers for residency tables. Never: tests."""

from __future__ import annotations

import torch

from proa.hybrid.layer_memory import LayerMemory
from proa.models import ranks
from proa.models.spec import Mlp
from proa.native.pool import Pool
from proa.ops.packed import Memory
from proa.ops.staging import Staging

CPU = torch.device("cpu")


def owners(experts: int, *resident: int, rank: int = 0) -> tuple[int, ...]:
    """Owners of a layer's experts: those in `resident` are on this rank's GPU, the others on the CPU."""
    return tuple(rank if e in resident else ranks.CPU for e in range(experts))


def layers(pool: Pool) -> list[LayerMemory]:
    """Layers with odd numbers of experts, so that rows are padded; the second without copies in RAM."""
    ram, staging = Memory(pool, [None]), Staging(pool, 1 << 20, pinned=False)
    return [
        LayerMemory(Mlp(32, 16), owners(7, 1, 4), True, CPU, ram, staging),
        LayerMemory(Mlp(32, 16), owners(3, 2), False, CPU, ram, staging),
        LayerMemory(Mlp(32, 16), owners(5), True, CPU, ram, staging),
    ]
