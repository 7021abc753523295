"""The ops table: every primitive named once. Belongs here: signatures, shapes, dtypes. Never: maths.

ops/reference.py is the specification. Layers get an `Ops` and call `ops.linear(...)`; which implementation
stands behind a name is settled once, in ops/select.py, and printed at start.

Shapes: T tokens of the step (all sequences concatenated), S sequences, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Where each sequence of a step keeps its KV.

    Sequence s owns q_len[s] consecutive rows of the step; its last row sits at position kv_len[s] - 1.
    page_table[s] lists its pages in order; slots[t] = page * page_tokens + offset is where row t's K and V go.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_table: tuple[Tensor, ...]  # int64 [pages of s], one per sequence
    slots: Tensor  # int64 [T]


@dataclass(frozen=True)
class KvPages:
    """One layer's cache. keys, values: [pages, page_tokens, kv_heads, D]."""

    keys: Tensor
    values: Tensor


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., N] / rms(x) * weight [N]; computed in float32, returned in x's dtype (arXiv 1910.07467)."""


class Rotary(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """x [T, heads, D] with the first R dims rotated; cos, sin float32 [T, R/2] (arXiv 2104.09864)."""


class Linear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N] in x's dtype, float32 accumulation."""


class SiluMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2I] -> silu(gate) * up, [T, I]; gate is the first half."""


class Route(Protocol):
    def __call__(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """softmax over logits [T, E] in float32 -> ids int64 [T, k], weights float32 [T, k], best first."""


class MoeExperts(Protocol):
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Sum over k of weights[t, k] * expert[ids[t, k]](x[t]).

        x [T, H]; gate_up [E, 2I, H]; down [E, H, I] -> [T, H]. Experts are added in ascending id, in float32.
        """


class WriteKv(Protocol):
    def __call__(self, keys: Tensor, values: Tensor, cache: KvPages, slots: Tensor) -> None:
        """Store keys, values [T, kv_heads, D] at slots [T]."""


class PagedAttention(Protocol):
    def __call__(self, q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None) -> Tensor:
        """Causal attention of q [T, heads, D] over each sequence's pages -> [T, heads, D]; softmax in float32."""


@dataclass(frozen=True)
class Ops:
    rms_norm: RmsNorm
    rotary: Rotary
    linear: Linear
    silu_mul: SiluMul
    route: Route
    moe_experts: MoeExperts
    write_kv: WriteKv
    attention: PagedAttention


def batch_of(
    q_lens: Sequence[int], kv_lens: Sequence[int], pages: Sequence[Sequence[int]], page_tokens: int
) -> AttentionBatch:
    """Build an AttentionBatch from plain lists: pages[s] are sequence s's pages in order."""
    slots = [
        pages[s][p // page_tokens] * page_tokens + p % page_tokens
        for s, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True))
        for p in range(kv - q, kv)
    ]
    tables = tuple(torch.tensor(pages[s][: -(-kv // page_tokens)], dtype=torch.int64) for s, kv in enumerate(kv_lens))
    return AttentionBatch(tuple(q_lens), tuple(kv_lens), tables, torch.tensor(slots, dtype=torch.int64))
