"""Experts that change places as often as they can. Never: tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engines import Loaded
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.executor import Executor
from proa.hybrid.copies import Copiers
from proa.hybrid.moves import Moves
from proa.machine.cost.heat import Swap
from proa.native.pool import Pool

DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


class Restless:
    """Replaces Heat: swaps every movable pair of a layer, round-robin."""

    def __init__(self) -> None:
        self.call = 0

    def observe(self, chosen: object, tokens: float, resident: object) -> None:
        pass

    def swaps(self, resident: Tensor, movable: Tensor) -> list[Swap]:
        self.call += 1
        found = []
        for layer, (inside, may) in enumerate(zip(resident, movable, strict=True)):
            ins, outs = ([int(e) for e in (side & may).nonzero()[0]] for side in (~inside, inside))
            if ins and outs:
                found.append(Swap(layer, ins[self.call % len(ins)], outs[self.call // 2 % len(outs)]))
        return found


@dataclass
class Moving:
    """A split model whose experts move all the time."""

    loaded: Loaded
    kept: list[Kept]

    @property
    def moves(self) -> Moves:
        moves = self.kept[-1].hybrid.moves
        assert moves is not None
        return moves


def restless(folder: Path, pool: Pool, split: Split, device: str, copiers: Copiers, **override: object) -> Moving:
    kept: list[Kept] = []
    loaded = load_split(folder, pool, split, device, lambda: copiers, kept, **override)

    def make(*sizes: object) -> Executor[Any]:
        executor = loaded.make(*sizes)
        made.moves.heat = Restless()
        return executor

    made = Moving(Loaded(loaded.spec, make), kept)
    return made
