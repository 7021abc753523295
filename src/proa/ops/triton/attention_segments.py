"""Kernels around attention over segments of a long past (ops/cuda_attention.py): copy a segment's keys and values out
of the pages, and merge the results of several segments (arXiv 2112.05682). Never: attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import KvPages
from proa.ops.sizes import SEGMENTS_MERGED
from proa.ops.triton.attention import LOG2E
from proa.ops.triton.kv_codes import elements, kind_of, load_rows
from proa.ops.triton.variant import Variant

GATHERED = 64  # tokens per program of _gather
MERGED = 16  # heads per program of _merge


@dataclass(frozen=True)
class Part:
    """Attention over one segment. out bfloat16 [rows, heads, D], contiguous vectors; sizes float32 [heads, rows],
    contiguous rows: natural logarithm of the sum of exponentials."""

    out: Tensor
    sizes: Tensor


@triton.jit(do_not_specialize=["first"])
def _gather(
    keys, values, pages, to_keys, to_values, first, page_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    KV: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    dim = tl.arange(0, WIDE)[None, :]
    here = (dim < DIM) & (row >= 0)[:, None]
    position = first + row
    page = tl.load(pages + position // PAGE_TOKENS).to(tl.int64)
    at = (page * page_stride + (position % PAGE_TOKENS) * token_stride)[:, None] + kv_head * head_stride + dim
    to = (row[:, None] * KV_HEADS + kv_head) * DIM + dim
    tl.store(to_keys + to, load_rows(keys + at, here, KV), here)
    tl.store(to_values + to, load_rows(values + at, here, KV), here)


@triton.jit
def _add(acc, most, total, out, sizes, factor, some, mine):
    """Add a part to the running result: acc [heads, D], and per head the largest log2 of a sum and the sum of weights
    relative to it."""
    size = tl.load(sizes, mine, 0.0) * LOG2E
    more = tl.maximum(most, size)
    shrink, weight = tl.exp2(most - more), tl.exp2(size - more)
    found = tl.load(out, some, 0.0).to(tl.float32)
    return acc * shrink[:, None] + found * (weight * factor)[:, None], more, total * shrink + weight


@triton.jit(do_not_specialize=["count", "sizes_head"])  # rows of a prompt, for some libraries
def _merge(
    first, first_sizes, out_0, out_1, out_2, sizes_0, sizes_1, sizes_2, to, to_sizes, count, factor,
    first_row, part_row, part_head, sizes_head, to_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mine, dim = head < HEADS, tl.arange(0, WIDE)[None, :]
    some = mine[:, None] & (dim < DIM)
    most = tl.load(first_sizes + row * HEADS + head, mine, 0.0)
    total = tl.full([TILE], 1.0, tl.float32)
    acc = tl.load(first + row * first_row + head[:, None] * DIM + dim, some, 0.0).to(tl.float32)
    at = row * part_row + head[:, None] * part_head + dim
    size_at = head * sizes_head + row
    acc, most, total = _add(acc, most, total, out_0 + at, sizes_0 + size_at, factor, some, mine)
    if count > 1:
        acc, most, total = _add(acc, most, total, out_1 + at, sizes_1 + size_at, factor, some, mine)
    if count > 2:
        acc, most, total = _add(acc, most, total, out_2 + at, sizes_2 + size_at, factor, some, mine)
    acc = acc / total[:, None]
    tl.store(to + row * to_row + head[:, None] * DIM + dim, acc.to(to.dtype.element_ty), some)
    tl.store(to_sizes + row * HEADS + head, most + tl.log2(total), mine)


def gather(
    cache: KvPages, pages: Tensor, first: int, to_keys: Tensor, to_values: Tensor, *, native_codes: bool | None = None
) -> None:
    """Copy the keys and values at positions first, first + 1, ... of one sequence, without the cache's scales.

    pages int32 [max pages]: those of the sequence. to_keys, to_values bfloat16 [tokens, kv_heads, D], contiguous;
    tokens a multiple of 64. native_codes: see kv_codes.kind_of.
    """
    tokens, kv_heads, dim = to_keys.shape
    if tokens % GATHERED or not to_keys.is_contiguous() or not to_values.is_contiguous():
        raise ValueError(f"a segment must be a multiple of {GATHERED} tokens and contiguous, not {to_keys.shape}")
    _gather[(tokens // GATHERED, kv_heads)](
        *elements(cache), pages, to_keys, to_values, first, *cache.keys.stride()[:3], KV_HEADS=kv_heads,
        PAGE_TOKENS=cache.keys.shape[1], DIM=dim, WIDE=triton.next_power_of_2(dim), TOKENS=GATHERED,
        KV=kind_of(cache, native_codes), num_warps=4,
    )  # fmt: skip


def merge(
    first: Tensor, first_sizes: Tensor, parts: Sequence[Part], factor: float, to: Tensor, to_sizes: Tensor
) -> None:
    """Merge a result and 1 to 3 parts, each times `factor`, over disjoint keys of the same rows into `to`, which may be
    `first`.

    first, to: bfloat16 or float32 [rows, heads, D], contiguous heads; first_sizes, to_sizes: float32 [rows, heads],
    contiguous: log2 of the sums of exponentials. to_sizes may be first_sizes.
    """
    rows, heads, dim = first.shape
    if not 1 <= len(parts) <= SEGMENTS_MERGED:
        raise ValueError(f"1 to {SEGMENTS_MERGED} parts are merged at once, not {len(parts)}")
    if len({(part.out.stride(), part.sizes.stride()) for part in parts}) > 1:
        raise ValueError("all parts must have the same strides")
    every = [parts[min(i, len(parts) - 1)] for i in range(SEGMENTS_MERGED)]
    _merge[(rows, -(-heads // MERGED))](
        first, first_sizes, *(part.out for part in every), *(part.sizes for part in every), to, to_sizes, len(parts),
        factor, first.stride(0), *parts[0].out.stride()[:2], parts[0].sizes.stride(0), to.stride(0),
        HEADS=heads, DIM=dim, WIDE=triton.next_power_of_2(dim), TILE=MERGED, num_warps=4,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    strides = ("page_stride", "token_stride", "head_stride")
    for kv_heads, dim, kv in ((4, 128, "bf16"), (8, 64, "e4m3"), (2, 256, "e4m3 by bits")):
        types = dict.fromkeys(("keys", "values"), "*bf16" if kv == "bf16" else "*u8")
        types |= {"pages": "*i32", "to_keys": "*bf16", "to_values": "*bf16", "first": "i32"}
        types |= dict.fromkeys(strides, "i32")
        constants: dict[str, object] = {"KV_HEADS": kv_heads, "PAGE_TOKENS": 16, "DIM": dim, "WIDE": dim}
        aligned = ("keys", "values", "pages", "to_keys", "to_values", *strides)
        oldest, newest = (89, None) if kv == "e4m3" else (80, 88 if kv == "e4m3 by bits" else None)
        yield Variant(_gather, types, constants | {"TOKENS": GATHERED, "KV": kv}, aligned=aligned, least=oldest,
                      newest=newest)  # fmt: skip
    outs, sizes = ("out_0", "out_1", "out_2"), ("sizes_0", "sizes_1", "sizes_2")
    rows = ("first_row", "part_row", "part_head", "sizes_head", "to_row")
    for first, to in (("*bf16", "*bf16"), ("*bf16", "*fp32"), ("*fp32", "*bf16"), ("*fp32", "*fp32")):
        types = dict.fromkeys(outs, "*bf16") | dict.fromkeys((*sizes, "first_sizes", "to_sizes"), "*fp32")
        types |= {"first": first, "to": to, "count": "i32", "factor": "fp32"} | dict.fromkeys(rows, "i32")
        multiples = (*outs, *sizes, *rows, "first", "first_sizes", "to", "to_sizes")
        for heads, dim in ((32, 128), (16, 192))[: 1 if to == "*bf16" else 2]:  # 192: expanded latents, merged in fp32
            merged: dict[str, object] = {"HEADS": heads, "DIM": dim, "WIDE": triton.next_power_of_2(dim)}
            yield Variant(_merge, types, merged | {"TILE": MERGED}, aligned=multiples, least=80)


def new_segment(tokens: int, kv_heads: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised keys and values bfloat16 [tokens, kv_heads, D] each."""
    keys, values = torch.empty(2, tokens, kv_heads, dim, dtype=torch.bfloat16, device=device)
    return keys, values
