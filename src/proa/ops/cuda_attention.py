"""Attention on an NVIDIA GPU: Proa's kernels over pages, and for long prompts a library's over segments of the past.
Never: the kernels, which of the two is faster.

A library's kernel needs contiguous keys and values, and prepares each shape and stride it is called with, which takes
40 to 70 ms with cuDNN (docs/decisions/056-attention-of-long-prompts.md). So it computes rectangles of a few fixed
shapes: tiles of contiguous query rows by segments of keys that all of these rows see. Proa's kernel computes the rest,
up to the diagonal, and the results are merged by their sums of exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from proa.ops.caches import KvPages
from proa.ops.gpu_traits import GpuTraits
from proa.ops.sizes import (
    SEGMENT_TOKENS,
    SEGMENTS_MERGED,
    SHORT_SEGMENT_TOKENS,
    attention_floats,
    attention_splits,
    prompt_splits,
    segment_rows,
)
from proa.ops.table import AttentionBatch, DeviceBatch
from proa.ops.triton import attention, attention_decode, attention_segments
from proa.ops.triton.attention import Softmax
from proa.ops.triton.attention_segments import Part


class Rectangle(Protocol):
    """A library's attention without a mask."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q [1, heads, rows, D], keys and values [1, kv_heads, tokens, D], bfloat16 with contiguous vectors ->
        softmax(scale q keys) values bfloat16 [1, heads, rows, D], and the natural logarithms of the sums of
        exponentials float32 [1, heads, rows, 1]. Raises RuntimeError if it cannot compute the shape."""


def cudnn(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Rectangle by cuDNN, which comes with torch."""
    out, sizes, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, keys, values, None, True, 0.0, False, False, scale=scale
    )
    return out, sizes


@dataclass(frozen=True)
class Tile:
    """`rows` query rows of a sequence, from `first` on. They see all of the first `covered` positions, which are a
    whole number of segments."""

    first: int
    rows: int
    covered: int


def tiles_of(rows: int, past: int, tile_rows: int, least: int) -> list[Tile]:
    """The tiles of a sequence's rows, after `past` earlier positions. least: tokens of the smallest segment. Tiles that
    see a segment have exactly `tile_rows` rows; the last of them may overlap the one before. The others, with no
    covered positions, are left to a kernel that takes any shape.
    """
    starts = list(range(0, rows - tile_rows + 1, tile_rows))
    if starts and rows % tile_rows >= tile_rows // 2:
        starts.append(rows - tile_rows)
    found = [Tile(at, tile_rows, (past + at) // least * least) for at in starts if past + at >= least]
    if not found:
        return [Tile(0, rows, 0)]
    head, end = found[0].first, found[-1].first + tile_rows
    before, after = [Tile(0, head, 0)] if head else [], [Tile(end, rows - end, 0)] if end < rows else []
    return [*before, *found, *after]


def segments_of(covered: int, tokens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first position, tokens) of the segments that cover so many positions; tokens: sizes of segments, falling."""
    at = 0
    for size in tokens:
        while covered - at >= size:
            yield at, size
            at += size


class SegmentedAttention:
    """Attention of prompts with a long past, in tiles and segments."""

    def __init__(
        self, rectangle: Rectangle, traits: GpuTraits, most_rows: int = 0, tokens: tuple[int, ...] = SEGMENT_TOKENS,
        short_tokens: tuple[int, ...] = SHORT_SEGMENT_TOKENS,
    ) -> None:  # fmt: skip
        """most_rows: query rows of a tile; 0: sizes.segment_rows. tokens: sizes of segments, falling. short_tokens:
        those of batches beside decode steps, with the same smallest size."""
        self._rectangle, self._native = rectangle, traits.converts_e4m3
        self._most_rows, self._tokens, self._short_tokens = most_rows, tokens, short_tokens

    def attend(self, q: Tensor, cache: KvPages, batch: AttentionBatch, softmax: Softmax, out: Tensor) -> bool:
        """As attention.prefill. Returns False, and computes nothing, if no row of the batch sees a segment."""
        if softmax.window is not None or self._tokens[-1] % cache.keys.shape[1]:
            return False
        rows = self._most_rows or segment_rows(q.shape[1])
        tiles = [
            tiles_of(q_len, kv_len - q_len, rows, self._tokens[-1])
            for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True)
        ]
        if not any(tile.covered for of in tiles for tile in of):
            return False
        row, sizes = 0, self._short_tokens if batch.beside_decode else self._tokens
        for s, (of, q_len, kv_len) in enumerate(zip(tiles, batch.q_lens, batch.kv_lens, strict=True)):
            pages = batch.on_device.page_table[s]
            for tile in of:
                mine = slice(row + tile.first, row + tile.first + tile.rows)
                seen = kv_len - q_len + tile.first + tile.rows
                segments = list(segments_of(tile.covered, sizes))
                self._tile(q[mine], cache, pages, seen, segments, softmax, out[mine])
            row += q_len
        return True

    def _tile(
        self, q: Tensor, cache: KvPages, pages: Tensor, seen: int, segments: Sequence[tuple[int, int]],
        softmax: Softmax, out: Tensor,
    ) -> None:  # fmt: skip
        """seen: positions that the last row sees. segments: (first position, tokens), without gaps from 0 on."""
        rows, heads, _ = q.shape
        covered = sum(tokens for _, tokens in segments)
        starts = torch.zeros(2, dtype=torch.int32, device=q.device)
        starts[1:].fill_(rows)  # filled by kernels: a copy would wait behind those of experts
        lens = torch.full((1,), seen - covered, dtype=torch.int32, device=q.device)
        sizes = torch.empty(rows, heads, device=q.device) if covered else None
        rest = pages[covered // cache.keys.shape[1] :][None]
        attention.prefill(q, cache, rest, starts, lens, softmax, out, sizes, native_codes=self._native)
        if sizes is None:
            return
        q = q.contiguous()  # rows of the fused projections are wider, and cuDNN prepares each stride anew
        merged, result = torch.empty(0), out
        if len(segments) > SEGMENTS_MERGED:
            merged = torch.empty(q.shape, device=q.device)
        for start in range(0, len(segments), SEGMENTS_MERGED):
            some = segments[start : start + SEGMENTS_MERGED]
            parts = [self._segment(q, cache, pages, first, tokens, softmax.scale) for first, tokens in some]
            to = out if some[-1] == segments[-1] else merged
            attention_segments.merge(result, sizes, parts, cache.value_scale, to, sizes)
            result = to

    def _segment(self, q: Tensor, cache: KvPages, pages: Tensor, first: int, tokens: int, scale: float) -> Part:
        kv_heads, dim = cache.keys.shape[2:]
        keys, values = attention_segments.new_segment(tokens, kv_heads, dim, q.device)
        attention_segments.gather(cache, pages, first, keys, values, native_codes=self._native)
        found, sizes = self._rectangle(by_head(q), by_head(keys), by_head(values), scale * cache.key_scale)
        return Part(found[0].transpose(0, 1), sizes[0, :, :, 0])


def by_head(x: Tensor) -> Tensor:
    """[T, heads, D] as [1, heads, T, D]."""
    return x.transpose(0, 1)[None]


class CudaAttention:
    """Implements `attention` of ops/table.py."""

    def __init__(self, traits: GpuTraits, least_rows: int = 1, *, deterministic: bool = False) -> None:
        """least_rows: see CudaOps. deterministic: a prompt's bits do not depend on the rows computed with it."""
        self._traits, self._least_rows, self._deterministic = traits, least_rows, deterministic
        self._segmented: SegmentedAttention | None = None

    def bind(self, segmented: SegmentedAttention) -> None:
        """Use it for long prompts."""
        self._segmented = segmented

    def __call__(
        self, q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`batch` must have device tensors."""
        at = batch.on_device
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        softmax, native = Softmax(scale, window, sinks), self._traits.converts_e4m3
        if at.rows_each != 1:
            if self._segmented is None or not self._segmented.attend(q, cache, batch, softmax, out):
                attention.prefill_in_splits(
                    q, cache, at.page_table, at.q_starts, at.kv_lens, softmax, self._prompt_splits(q, cache, at), out,
                    native_codes=native,
                )  # fmt: skip
            return out
        rows, heads, dim = q.shape
        splits = attention_splits(max(rows, self._least_rows), cache.keys.shape[2], self._traits.processors)
        space = torch.empty(attention_floats(rows, heads, dim, splits), device=q.device)
        attention_decode.decode(
            q, cache, at.page_table, at.kv_lens, softmax, splits, space, out, native_codes=native
        )  # fmt: skip
        return out

    def _prompt_splits(self, q: Tensor, cache: KvPages, at: DeviceBatch) -> int:
        """By sizes alone, which a graph keeps; as many as the longest sequence that the page table holds may have."""
        if self._deterministic:
            return 1
        (rows, heads, _), most = q.shape, at.page_table.shape[1] * cache.keys.shape[1] // attention.LEAST_SHARE
        splits = prompt_splits(rows, heads, cache.keys.shape[2], self._traits.processors)
        return max(1, min(splits, most))
