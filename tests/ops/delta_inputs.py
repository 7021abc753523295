"""Inputs of the gated delta rule on a device. Never: tests."""

from __future__ import annotations

import torch

from ops.triton_bounds import poisoned
from proa.ops.gpu_traits import traits_of
from proa.ops.sizes import delta_chunk_floats
from proa.ops.table import DeltaInputs, DeviceBatch
from proa.ops.triton.delta_chunks import LEAST_KIB, OLDEST, Chunks, shape_for


def batch(q_lens: list[int], kv_lens: list[int], states: list[int], device: torch.device) -> DeviceBatch:
    starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    numbers = (torch.tensor(n, dtype=torch.int32, device=device) for n in (starts, kv_lens, states))
    starts_t, kv_t, states_t = numbers
    return DeviceBatch(max(q_lens) == 1, starts_t, kv_t, torch.zeros(len(q_lens), 1, dtype=torch.int32), states_t)


def chunks_of(rows: int, heads: int, device: torch.device) -> Chunks:
    """Chunk resources of the device; without a GPU, those of the smallest one."""
    kib, capability = LEAST_KIB, OLDEST
    if device.type == "cuda":
        kib, capability = traits_of(device).shared_bytes >> 10, traits_of(device).capability
    shape = shape_for(capability, kib << 10)
    assert shape is not None
    return Chunks(shape, poisoned(delta_chunk_floats(rows, heads), dtype=torch.float32).to(device))


def on(x: DeltaInputs, device: torch.device) -> DeltaInputs:
    """Move views to a device, keeping their strides."""
    return DeltaInputs(*(_like(t, device) for t in vars(x).values()))


def _like(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)
