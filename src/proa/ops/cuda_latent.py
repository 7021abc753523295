"""Latent attention on an NVIDIA GPU: the products with W_k and W_v, and what a step's rows attend to. Never: kernels,
whether expanded keys and values are faster.

Over latents ("absorbed", docs/decisions/031-latent-attention.md) W_k maps the queries into the latents' space, and W_v
the weighted sums back. Long parts of prompts may have a head's keys and values expanded instead (decision 078).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from proa.ops.caches import LatentPages
from proa.ops.expanded_latents import ExpandedAttention
from proa.ops.gpu_traits import GpuTraits
from proa.ops.products import batched_into
from proa.ops.sizes import LATENT_ROWS, attention_floats, expands
from proa.ops.table import Angles, AttentionBatch, DeviceBatch, Norm, Parameters
from proa.ops.triton import latent_attention
from proa.ops.triton.head_linear import head_linear
from proa.ops.triton.latent_store import latent_store

FEW_TOKENS = 64  # up to this many, head_linear reads each head's weights once or a few times; above, cuBLAS is faster


class CudaLatentAttention:
    """Implements latent_store of ops/table.py, and attention for CudaLatentMaps."""

    def __init__(self, traits: GpuTraits, least_rows: int = 1) -> None:
        """least_rows: see CudaOps."""
        self._traits, self._least_rows = traits, least_rows
        self.expanded: ExpandedAttention | None = None

    def bind(self, expanded: ExpandedAttention) -> None:
        """Use it where it takes fewer products."""
        self.expanded = expanded

    def store(self, q: Tensor, kv: Tensor, norm: Norm, angles: Angles, cache: LatentPages, slots: Tensor) -> Tensor:
        latent_store(q, kv, norm, angles, cache, slots)
        return q

    def over_latents(self, q: Tensor, cache: LatentPages, at: DeviceBatch, scale: float) -> Tensor:
        """q [T, heads, rank + R] -> [T, heads, rank]: keys of every head are the cached rows, values their latents."""
        (rows, heads, _), rank, shared = q.shape, cache.rank, self._traits.shared_bytes
        out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
        if at.rows_each != 1:
            latent_attention.prefill(q, cache, at.page_table, at.q_starts, at.kv_lens, scale, shared, out)
            return out
        splits = latent_attention.splits_for(max(rows, self._least_rows), heads, self._traits.processors, shared)
        space = torch.empty(attention_floats(rows, heads, rank, splits), device=q.device)
        latent_attention.decode(q, cache, at.page_table, at.kv_lens, scale, splits, shared, space, out)
        return out


class CudaLatentMaps:
    """W_k and W_v as one tensor, bfloat16 [heads, K + V, rank]."""

    def __init__(
        self, heads: int, keys: int, values: int, rank: int, device: torch.device, attention: CudaLatentAttention
    ) -> None:  # fmt: skip
        self.weight = torch.empty(heads * (keys + values), rank, dtype=torch.bfloat16, device=device)
        self._heads = self.weight.view(heads, keys + values, rank)
        self._keys, w_v = torch.split(self._heads, [keys, values], 1)
        self._values, self._attention = w_v.transpose(1, 2), attention

    def attend(self, q: Tensor, cache: LatentPages, batch: AttentionBatch, scale: float) -> Tensor:
        """`batch` must have device tensors."""
        expanded, keys = self._attention.expanded, self._keys.shape[1]
        if expanded is not None:
            widths = cache.rank, q.shape[2] - keys, keys, self._values.shape[2]
            lens = zip(batch.q_lens, batch.kv_lens, strict=True)
            chosen = [expands(q_len, kv_len - q_len, *widths) for q_len, kv_len in lens]
            if any(chosen):
                return self._divided(q, cache, batch, expanded, chosen, scale)
        return self._absorbed(q, cache, batch.on_device, scale)

    def _absorbed(self, q: Tensor, cache: LatentPages, at: DeviceBatch, scale: float) -> Tensor:
        if at.rows_each == 1 or len(q) <= LATENT_ROWS:
            return self.values(self._attention.over_latents(self.queries(q), cache, at, scale))
        out = torch.empty(len(q), q.shape[1] * self._values.shape[2], dtype=q.dtype, device=q.device)
        for first in range(0, len(q), LATENT_ROWS):
            end = min(first + LATENT_ROWS, len(q))
            queries, part = self.queries(q[first:end]), _rows_of(at, first, end)
            out[first:end] = self.values(self._attention.over_latents(queries, cache, part, scale))
        return out

    def _divided(
        self, q: Tensor, cache: LatentPages, batch: AttentionBatch, expanded: ExpandedAttention,
        chosen: Sequence[bool], scale: float,
    ) -> Tensor:  # fmt: skip
        """Compute chosen sequences one by one with expanded keys and values, neighbours among the others together."""
        (rows, heads, _), values = q.shape, self._values.shape[2]
        out = torch.empty(rows, heads, values, dtype=q.dtype, device=q.device)
        starts, at = list(accumulate(batch.q_lens, initial=0)), batch.on_device
        for is_chosen, group in groupby(range(len(chosen)), chosen.__getitem__):
            some = list(group)
            if not is_chosen:
                mine, part = slice(starts[some[0]], starts[some[-1] + 1]), _part_of(at, some[0], some[-1] + 1)
                out[mine] = self._absorbed(q[mine], cache, part, scale).view(-1, heads, values)
                continue
            for s in some:
                mine, past = slice(starts[s], starts[s + 1]), batch.kv_lens[s] - batch.q_lens[s]
                expanded.attend(
                    q[mine], self._heads, cache, at.page_table[s], past, scale, out[mine],
                    beside_decode=batch.beside_decode,
                )  # fmt: skip
        return out.flatten(1)

    def queries(self, q: Tensor) -> Tensor:
        """As reference.TorchLatentMaps."""
        (tokens, heads, width), (keys, rank) = q.shape, self._keys.shape[1:]
        out = torch.empty(tokens, heads, rank + width - keys, dtype=q.dtype, device=q.device)
        if tokens <= FEW_TOKENS:
            head_linear(q, self._keys, out)
            return out
        batched_into(q[..., :keys].transpose(0, 1), self._keys, out[..., :rank].transpose(0, 1))
        out[..., rank:] = q[..., keys:]
        return out

    def values(self, seen: Tensor) -> Tensor:
        """As reference.TorchLatentMaps."""
        (tokens, heads, _), values = seen.shape, self._values.shape[2]
        out = torch.empty(tokens, heads, values, dtype=seen.dtype, device=seen.device)
        if tokens <= FEW_TOKENS:
            head_linear(seen, self._values, out)
        else:
            batched_into(seen.transpose(0, 1), self._values, out.transpose(0, 1))
        return out.flatten(1)

    def parameters(self) -> Parameters:
        yield "kv_b.weight", self.weight


def _rows_of(at: DeviceBatch, first: int, end: int) -> DeviceBatch:
    """Rows first <= t < end of a prompt's batch: of every sequence those among them, often none."""
    starts, ends = at.q_starts.clamp(first, end) - first, at.q_starts[1:]
    return replace(at, q_starts=starts, kv_lens=at.kv_lens - (ends - ends.clamp(max=end)))


def _part_of(at: DeviceBatch, first: int, end: int) -> DeviceBatch:
    """Sequences first <= s < end of a prompt's batch, whose tensors are copied: Triton compiles separate kernels for
    addresses that are not aligned."""
    starts, lens, table = at.q_starts[first : end + 1], at.kv_lens[first:end], at.page_table[first:end]
    return DeviceBatch(0, starts - starts[:1], lens.clone(), table.clone(), at.states[first:end])
