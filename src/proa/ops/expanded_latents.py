"""Latent attention of prompts by expanded keys and values: W_k and W_v are applied to a segment's latents, and a
library's attention computes heads of K + R dims. Never: storing latents, attention over latents, which of the two.

Over latents a head takes 2 (2 rank + R) FLOPs per row and key. Expanded it takes 2 (K + R + V), and 2 rank (K + V) per
key for each block of rows. With DeepSeek-V3's widths these are 2176, 640 and 262144. flash-attention has only values
that are padded to the keys' dims, 768 FLOPs; on an H200 it reaches 300 TFLOP/s, cuDNN 690 with 640 FLOPs. But cuDNN
prepares each shape it is called with, so it gets whole segments and tiles of rows (ops/cuda_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2
from typing import Protocol

import torch
from torch import Tensor

from proa.ops.caches import LatentPages
from proa.ops.cuda_attention import Rectangle, by_head, segments_of
from proa.ops.sizes import EXPANDED_ROWS, SEGMENT_TOKENS, SEGMENTS_MERGED, SHORT_SEGMENT_TOKENS, expanded_heads
from proa.ops.triton import attention_segments
from proa.ops.triton.attention_segments import Part

TILE_ROWS = 1024  # of a library's attention without a mask: with 16 heads a program for each of 128 SMs


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


class ExpandedAttention:
    """Attention of one sequence's rows at a time."""

    def __init__(
        self, causal: Causal, most_rows: int, rectangle: Rectangle | None = None,
        tokens: tuple[int, ...] = SEGMENT_TOKENS, short_tokens: tuple[int, ...] = SHORT_SEGMENT_TOKENS,
        tile_rows: int = TILE_ROWS,
    ) -> None:  # fmt: skip
        """most_rows: of a step. rectangle: for tiles of `tile_rows` rows over whole segments; None: `causal` computes
        all. tokens: sizes of segments, falling; short_tokens: of those beside decode steps."""
        self._causal, self._rectangle, self._tile_rows = causal, rectangle, tile_rows
        self._most_rows, self._tokens, self._short_tokens = min(most_rows, EXPANDED_ROWS), tokens, short_tokens

    def attend(
        self, q: Tensor, weight: Tensor, cache: LatentPages, pages: Tensor, past: int, scale: float, out: Tensor,
        *, beside_decode: bool,
    ) -> None:  # fmt: skip
        """q [rows, heads, K + R], the rows after `past` positions, which are stored; weight [heads, K + V, rank];
        pages int32 [max pages]: those of the sequence; out [rows, heads, V]. bfloat16."""
        sizes = self._short_tokens if beside_decode else self._tokens
        for first in range(0, len(q), EXPANDED_ROWS):
            mine = slice(first, first + EXPANDED_ROWS)
            self._block(q[mine], weight, cache, pages, past + first, scale, out[mine], sizes)

    def _block(
        self, q: Tensor, weight: Tensor, cache: LatentPages, pages: Tensor, past: int, scale: float, out: Tensor,
        sizes: tuple[int, ...],
    ) -> None:  # fmt: skip
        (rows, heads, dim), values = q.shape, out.shape[2]
        keys = weight.shape[1] - values
        segments = list(segments_of(past, sizes))
        end = sum(tokens for _, tokens in segments)
        segments.append((end, past + rows - end))
        # Kernels for several segments are compiled or prepared for a number of heads: it depends on no prompt.
        longest = past + rows if len(segments) == 1 else max(self._tokens[0], self._most_rows + sizes[-1])
        group = expanded_heads(longest, heads, dim - keys, keys, values)
        for first in range(0, heads, group):
            mine = slice(first, first + group)
            # A group's result is not kept while the next one is computed: 12 MB for each 1024 rows.
            out[:, mine] = self._group(q[:, mine], weight[mine], cache, pages, segments, scale, values)

    def _group(
        self, q: Tensor, weight: Tensor, cache: LatentPages, pages: Tensor, segments: Sequence[tuple[int, int]],
        scale: float, value_dim: int,
    ) -> Tensor:  # fmt: skip
        """Segments are gathered for each group again: the latents of a long context would need too much memory."""
        *before, (first, tokens) = segments
        expanded = self._expanded(weight, _gather(cache, pages, first, tokens), cache.rank, value_dim)
        found, logs = self._causal(q, expanded.keys, expanded.padded(), scale, causal=True)
        if not before:
            return found[..., :value_dim]
        del expanded
        sizes, found = (logs.T * log2(e)).contiguous(), found[..., :value_dim].contiguous()
        to, tiles = torch.empty(found.shape, device=q.device), self._tiles(q)
        for start in range(0, len(before), SEGMENTS_MERGED):
            parts: list[list[Part]] = [[] for _ in tiles]
            for at, count in before[start : start + SEGMENTS_MERGED]:
                expanded = self._expanded(weight, _gather(cache, pages, at, count), cache.rank, value_dim)
                for of, tile in zip(parts, tiles, strict=True):
                    of.append(self._part(tile, expanded, scale))
                del expanded
            row = 0
            for of in parts:
                mine = slice(row, row + len(of[0].out))
                attention_segments.merge(found[mine], sizes[mine], of, 1.0, to[mine], sizes[mine])
                row = mine.stop
            found = to
        return found

    def _tiles(self, q: Tensor) -> list[Tensor]:
        """The rows in tiles; a rectangle's have one shape, and its last one may have other rows behind q's."""
        if self._rectangle is None:
            return [q]
        each = self._tile_rows
        whole = q.new_zeros(-(-len(q) // each) * each, *q.shape[1:])
        whole[: len(q)] = q
        return [whole[first : first + each] for first in range(0, len(q), each)]

    def _part(self, q: Tensor, of: _Expanded, scale: float) -> Part:
        if self._rectangle is None:
            out, logs = self._causal(q, of.keys, of.padded(), scale, causal=False)
            return Part(out[..., : of.values.shape[2]], logs)
        found, logs = self._rectangle(by_head(q), by_head(of.keys), by_head(of.values), scale)
        return Part(found[0].transpose(0, 1), logs[0, :, :, 0])

    def _expanded(self, weight: Tensor, latents: Tensor, rank: int, value_dim: int) -> _Expanded:
        (heads, _, _), tokens = weight.shape, len(latents)
        both = (latents[:, :rank] @ weight.flatten(0, 1).T).view(tokens, heads, -1)
        plain, values = both[..., :-value_dim], both[..., -value_dim:]
        keys = both.new_empty(tokens, heads, plain.shape[2] + latents.shape[1] - rank)
        keys[..., : plain.shape[2]] = plain
        keys[..., plain.shape[2] :] = latents[:, None, rank:]
        return _Expanded(keys, values)


@dataclass(frozen=True)
class _Expanded:
    """Keys [tokens, heads, K + R], values [tokens, heads, V], of a segment."""

    keys: Tensor
    values: Tensor

    def padded(self) -> Tensor:
        """Values with zeros up to the keys' dims."""
        padded = torch.empty_like(self.keys)
        padded[..., : self.values.shape[2]] = self.values
        padded[..., self.values.shape[2] :] = 0
        return padded


def _gather(cache: LatentPages, pages: Tensor, first: int, tokens: int) -> Tensor:
    """Copy the rows of positions first, first + 1, ..."""
    page_tokens = cache.rows.shape[1]
    of, skipped = pages[first // page_tokens : -(-(first + tokens) // page_tokens)], first % page_tokens
    return cache.rows.index_select(0, of).flatten(0, 1)[skipped : skipped + tokens]
