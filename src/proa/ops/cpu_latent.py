"""Latent attention on the CPU, recorded: products with W_k and W_v, attention over latents. Never: storing latents."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.native.fill import Fill, StoredRows, fill
from proa.native.formats import Order, Stored
from proa.native.program import LatentCache
from proa.ops.caches import LatentPages
from proa.ops.packed import Memory, Stack
from proa.ops.recorder import Recorder, rows_of
from proa.ops.table import AttentionBatch, Parameters


class CpuLatentMaps:
    """W_k^T and W_v, one packed matrix of each per head."""

    def __init__(self, to: Recorder, heads: int, keys: int, values: int, rank: int) -> None:
        self._to, self._heads = to, heads
        self._keys = Stack(to.memory, heads, rank, keys, stored={"BF16"})
        self._values = Stack(to.memory, heads, values, rank, stored={"BF16"})

    def attend(self, q: Tensor, cache: LatentPages, batch: AttentionBatch, scale: float) -> Tensor:
        """`batch` is ignored: the executor sets the program's batch before each step."""
        queries, out = self.queries(q), self._to.new(self._heads * cache.rank)
        self._to.program.add_latent_attention(latent_cache(cache), rows_of(queries), rows_of(out), self._heads, scale)
        return self.values(out.view(len(q), self._heads, cache.rank))

    def queries(self, q: Tensor) -> Tensor:
        """As reference.TorchLatentMaps."""
        rank, keys = self._keys.rows, self._keys.columns
        wide = rank + q.shape[2] - keys
        out = self._to.new(self._heads * wide)
        self._to.program.add_head_linear(
            self._keys.matrix, rows_of(q), q.shape[2], rows_of(out), wide, carried=wide - rank
        )
        return out.view(-1, self._heads, wide)

    def values(self, seen: Tensor) -> Tensor:
        """As reference.TorchLatentMaps."""
        out = self._to.new(self._heads * self._values.rows)
        self._to.program.add_head_linear(
            self._values.matrix, rows_of(seen), seen.shape[2], rows_of(out), self._values.rows
        )
        return out

    def parameters(self) -> Parameters:
        yield "kv_b.weight", _HeadRows(self._to.memory, self._heads, self._keys, self._values)


class _HeadRows:
    """The sink of kv_b: per head the rows of W_k, then of W_v. Rows must arrive in order: a head is packed, W_k
    transposed, once it is complete."""

    row_unit = 1

    def __init__(self, memory: Memory, heads: int, keys: Stack, values: Stack) -> None:
        self._memory, self._stacks = memory, (keys, values)
        self._per_head, rank = keys.columns + values.rows, keys.rows
        self.shape = (heads * self._per_head, rank)
        self._next = 0
        self._head = torch.empty(0)

    def expect(self, stored: str) -> None:
        """Do nothing: both are always packed as bfloat16."""

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> None:
        return None

    def write(self, first: int, rows: Tensor) -> None:
        if first != self._next:
            raise ValueError(f"rows of kv_b must be written in order: row {self._next} was expected, not {first}")
        while len(rows):
            head, at = divmod(self._next, self._per_head)
            if at == 0:
                self._head = torch.empty(self._per_head, self.shape[1], dtype=torch.bfloat16)
            some = rows[: self._per_head - at]
            self._head[at : at + len(some)] = some
            self._next, rows = self._next + len(some), rows[len(some) :]
            if self._next % self._per_head == 0:
                self._pack(head)

    def _pack(self, head: int) -> None:
        keys, values = self._stacks
        size = 2 * self.shape[1]
        transposed = StoredRows(Stored.BF16, self._head.data_ptr(), size, order=Order.TRANSPOSED)
        plain = StoredRows(Stored.BF16, self._head[keys.columns :].data_ptr(), size)
        jobs: list[Fill] = keys.fills(head, 0, 0, keys.rows, transposed) + values.fills(head, 0, 0, values.rows, plain)
        fill(self._memory.pool, jobs)


def latent_cache(cache: LatentPages) -> LatentCache:
    pages, page_tokens, width = cache.rows.shape
    return LatentCache(cache.rows.data_ptr(), pages, page_tokens, cache.rank, width - cache.rank)
