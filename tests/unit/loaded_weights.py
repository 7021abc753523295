"""Weights loaded into packed memory. Never: tests."""

from __future__ import annotations

from pathlib import Path

from proa.layers.decoder import Decoder
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory
from proa.plan.packed_size import packed_size
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights
from proa.weights.sources import resolve, stored_types


def loaded(path: Path) -> tuple[int, int, int]:
    """Planned bytes, bytes read per token, and bytes that the packed weights actually take."""
    checkpoint = open_checkpoint(path)
    declared = checkpoint.declare()
    with Pool([[]], pin=False) as pool:
        memory = Memory(pool, [None])
        model = Decoder(declared.spec, CpuOps(Recorder(pool, memory, 4, 1, 1)).table())
        load_weights(checkpoint, declared, dict(model.parameters()), lambda done, total: None, pool)
    plain = sum(t.nbytes for _, t in model.parameters() if hasattr(t, "nbytes"))
    size = packed_size(declared.spec, stored_types(resolve(declared, checkpoint.tensors), checkpoint.tensors))
    return size.total_bytes, size.active_bytes, sum(memory.bytes_by_format.values()) + plain
