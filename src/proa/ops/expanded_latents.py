"""Latent attention of prompts by expanded keys and values: W_k and W_v are applied to a segment's latents, and a
library's attention computes heads of K + R dims. Never: storing latents, attention over latents, which of the two.

Over latents a head takes 2 (2 rank + R) FLOPs per row and key. Expanded it takes 4 (K + R), values being padded to the
keys' dims, and 2 rank (K + V) per key for each chunk of rows. With DeepSeek-V3's widths these are 2176, 768 and
262144.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2
from typing import Protocol

import torch
from torch import Tensor

from proa.ops.caches import LatentPages
from proa.ops.sizes import SEGMENT_TOKENS, SEGMENTS_MERGED, SHORT_SEGMENT_TOKENS, expanded_heads
from proa.ops.triton import attention_segments
from proa.ops.triton.attention_segments import Part


class Causal(Protocol):
    """A library's attention, with or without a causal mask."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
        """bfloat16 q [rows, heads, D], keys and values [tokens, heads, D], contiguous vectors -> bfloat16
        [rows, heads, D], contiguous heads, and natural logarithms of the sums of exponentials float32 [heads, rows].
        causal: the last row sees all tokens, each row before it one fewer. Raises RuntimeError if it cannot compute
        the shape."""


def flash(q: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Causal by flash-attention 2, which comes with torch."""
    ends = [torch.zeros(2, dtype=torch.int32, device=q.device) for _ in range(2)]
    for end, count in zip(ends, (len(q), len(keys)), strict=True):
        end[1:].fill_(count)  # filled by a kernel: a copy would wait behind those of experts
    out, sizes, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, *ends, len(q), len(keys), 0.0, causal, False, scale=scale
    )
    heads = q.shape[1]
    if sizes.shape == (1, heads, len(q)):
        sizes = sizes[0]
    if sizes.shape != (heads, len(q)):
        raise RuntimeError(f"flash attention returned sums {tuple(sizes.shape)}, not {(heads, len(q))}")
    return out, sizes


def segments_for(rows: int, past: int, most: int, page_tokens: int) -> list[tuple[int, int]]:
    """(first position, tokens) of the segments of a sequence, each from the start of a page on. The last holds all
    rows; it has more than `most` tokens only if the rows and a part of a page do. most: a multiple of page_tokens."""
    found, at = list[tuple[int, int]](), 0
    while at + most <= past:
        found.append((at, most))
        at += most
    before = past // page_tokens * page_tokens
    if past + rows - at > most and before > at:
        found.append((at, before - at))
        at = before
    return [*found, (at, past + rows - at)]


class ExpandedAttention:
    """Attention of one sequence's rows at a time."""

    def __init__(
        self, causal: Causal, most_rows: int, tokens: int = SEGMENT_TOKENS[0],
        short_tokens: int = SHORT_SEGMENT_TOKENS[0],
    ) -> None:  # fmt: skip
        """most_rows: of a step. tokens: of a sequence's segments; short_tokens: of those beside decode steps. Multiples
        of a page's."""
        self._causal, self._most_rows = causal, most_rows
        self._tokens, self._short_tokens = tokens, short_tokens

    def attend(
        self, q: Tensor, weight: Tensor, cache: LatentPages, pages: Tensor, past: int, scale: float, out: Tensor,
        *, beside_decode: bool,
    ) -> None:  # fmt: skip
        """q [rows, heads, K + R], the rows after `past` positions, which are stored; weight [heads, K + V, rank];
        pages int32 [max pages]: those of the sequence; out [rows, heads, V]. bfloat16."""
        (rows, heads, dim), values, page_tokens = q.shape, out.shape[2], cache.rows.shape[1]
        keys, most = weight.shape[1] - values, self._short_tokens if beside_decode else self._tokens
        segments = segments_for(rows, past, most, page_tokens)
        # Merging kernels are compiled for a number of heads, which must not depend on the prompt.
        longest = past + rows if len(segments) == 1 else max(most, self._most_rows + page_tokens)
        group = expanded_heads(longest, heads, dim - keys, keys, values)
        for first in range(0, heads, group):
            mine = slice(first, first + group)
            # A group's result is not kept while the next one is computed: 12 MB for each 1024 rows.
            out[:, mine] = self._group(q[:, mine], weight[mine], cache, pages, segments, scale)[..., :values]

    def _group(
        self, q: Tensor, weight: Tensor, cache: LatentPages, pages: Tensor, segments: Sequence[tuple[int, int]],
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Segments are gathered for each group again: the latents of a long context would need too much memory."""
        *before, (first, tokens) = segments
        found, logs = self._segment(q, weight, _gather(cache, pages, first, tokens), cache.rank, scale, causal=True)
        if not before:
            return found
        sizes = (logs.T * log2(e)).contiguous()
        to = torch.empty(found.shape, device=q.device)
        for start in range(0, len(before), SEGMENTS_MERGED):
            some = before[start : start + SEGMENTS_MERGED]
            parts = [
                Part(*self._segment(q, weight, _gather(cache, pages, at, count), cache.rank, scale, causal=False))
                for at, count in some
            ]
            attention_segments.merge(found, sizes, parts, 1.0, to, sizes)
            found = to
        return found

    def _segment(
        self, q: Tensor, weight: Tensor, latents: Tensor, rank: int, scale: float, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        (_, heads, dim), tokens = q.shape, len(latents)
        plain = dim - (latents.shape[1] - rank)
        expanded = (latents[:, :rank] @ weight.flatten(0, 1).T).view(tokens, heads, -1)
        keys, values = torch.empty(2, tokens, heads, dim, dtype=q.dtype, device=q.device)
        keys[..., :plain] = expanded[..., :plain]
        keys[..., plain:] = latents[:, None, rank:]
        value_dim = expanded.shape[2] - plain
        values[..., :value_dim] = expanded[..., plain:]
        values[..., value_dim:] = 0
        return self._causal(q, keys, values, scale, causal=causal)


def _gather(cache: LatentPages, pages: Tensor, first: int, tokens: int) -> Tensor:
    """Copy the rows of positions first, first + 1, ...; first: that of a page."""
    page_tokens = cache.rows.shape[1]
    of = pages[first // page_tokens : -(-(first + tokens) // page_tokens)]
    return cache.rows.index_select(0, of).flatten(0, 1)[:tokens]
