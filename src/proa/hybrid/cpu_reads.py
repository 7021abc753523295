"""Measurement of the CPU's rate: it computes one token's experts of a layer repeatedly. Never: using the rate."""

from __future__ import annotations

import torch

from proa.hybrid.layer_memory import LayerMemory
from proa.native.pool import Pool
from proa.native.weights import Rows, moe


class CpuReads:
    """Each call computes `at_once` of the layer's experts in RAM. The calling thread takes part."""

    def __init__(self, memory: LayerMemory, pool: Pool, at_once: int) -> None:
        if memory.stacks is None:
            raise ValueError("no expert of this layer is in RAM")
        hidden, self._pool, self._experts = memory.shape.hidden, pool, memory.stacks.experts()
        self._count = min(at_once, len(memory.in_ram))
        self._bytes = self._count * (memory.shape.up.matrix_bytes + memory.shape.down.matrix_bytes)
        self._ids = torch.randperm(len(memory.in_ram), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        self._at = 0
        self._weights = torch.ones(1, self._count)
        self._x, self._y = torch.zeros(1, hidden, dtype=torch.bfloat16), torch.empty(1, hidden)

    def __call__(self) -> int:
        """Compute the next experts; return the bytes of weights read."""
        hidden, first = self._x.shape[1], self._at
        self._at = first + self._count if first + 2 * self._count <= len(self._ids) else 0
        moe(
            self._pool, self._experts, Rows(self._x.data_ptr(), hidden), Rows(self._y.data_ptr(), hidden, True), 1,
            ids=self._ids[first:].data_ptr(), weights=self._weights.data_ptr(), top_k=self._count,
        )  # fmt: skip
        return self._bytes
