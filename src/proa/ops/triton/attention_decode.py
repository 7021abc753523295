"""Causal attention of one query row per sequence over a paged cache, with an online softmax in float32.

A program's tile holds all query heads that share a KV head, so that K and V are read once for them. Several programs
share a sequence's positions (split-KV), and a second kernel combines their partial results. attention.py has prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import KvPages
from proa.ops.sizes import MOST_SPLITS, attention_floats
from proa.ops.triton.attention import LOG2E, LOWEST, STRIDES, Softmax, attend, cases, check, wide_of
from proa.ops.triton.kv_codes import elements, kind_of
from proa.ops.triton.variant import Variant

PART = 32  # splits combined at once


@triton.jit
def _range_and_share(kv_len, splits, window, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """First position that a decoded row sees, and positions per split, a multiple of the block."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, kv_len - window)
    return begin, tl.cdiv(tl.cdiv(kv_len - begin, splits), TOKENS) * TOKENS


@triton.jit
def _decode(
    q, keys, values, page_table, kv_lens, sinks, partial, sizes, heads, window, scale, value_scale,
    q_row, table_row, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    member = tl.arange(0, TILE)
    head = kv_head * GROUP + member
    mine = member < GROUP
    result = (sequence * heads + head) * splits + split
    kv_len = tl.load(kv_lens + sequence)
    begin, share = _range_and_share(kv_len, splits, window, TOKENS, WINDOW)
    first = begin + split * share
    last = tl.minimum(kv_len, first + share)
    if first >= last:
        return
    dim = tl.arange(0, WIDE)[None, :]
    some = mine[:, None] & (dim < DIM)
    tile = tl.load(q + sequence * q_row + head[:, None] * DIM + dim, some, 0.0)
    most, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    if SINKS:  # noqa: SIM102 - decided when compiling, unlike the next one
        if split == 0:
            most = tl.maximum(tl.load(sinks + head, mine, 0.0) * LOG2E, LOWEST)
            total += 1.0
    acc, most, total = attend(
        tile, tl.zeros([TILE, WIDE], tl.float32), most, total, keys + kv_head * head_stride,
        values + kv_head * head_stride, page_table + sequence * table_row, first, last,
        tl.full([TILE], 2**31 - 1, tl.int32), scale * LOG2E, page_stride, token_stride, window,
        True, False, PAGE_TOKENS, DIM, TOKENS, KV,
    )  # fmt: skip
    tl.store(partial + result[:, None] * DIM + dim, acc / total[:, None] * value_scale, some)
    tl.store(sizes + result, most + tl.log2(total), mine)


@triton.jit
def _found(partial, sizes, at, part, splits, dim, DIM: tl.constexpr):
    """Load the partial results of splits and their log-sum-exp; arbitrary values for splits that were not written."""
    there = part < splits
    found = tl.load(partial + (at + part)[:, None] * DIM + dim, there[:, None] & (dim < DIM), 0.0)
    return found, tl.load(sizes + at + part, there, 0.0)


@triton.jit
def _weighed(found, size, used, most):
    weight = tl.exp2(tl.where(used, size - most, 0.0))
    return tl.sum(tl.where(used[:, None], weight[:, None] * found, 0.0), 0)


@triton.jit(do_not_specialize=["splits"])  # varies with the batch size
def _combine(
    partial, sizes, kv_lens, out, heads, splits, window, out_row,
    DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of the splits of a row and head. sizes: log2 of their sums of exponentials. With up
    to PART splits in use, no load depends on another one."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = (row * heads + head) * splits
    split, part, dim = tl.arange(0, SPLITS), tl.arange(0, PART), tl.arange(0, WIDE)[None, :]
    found, size = _found(partial, sizes, at, part, splits, dim, DIM)
    every = tl.load(sizes + at + split, split < splits, 0.0)
    kv_len = tl.load(kv_lens + row)
    begin, share = _range_and_share(kv_len, splits, window, TOKENS, WINDOW)
    used = tl.cdiv(kv_len - begin, tl.maximum(share, 1))  # the other splits were not written
    every = tl.where(split < used, every, float("-inf"))
    most = tl.maximum(tl.max(every, 0), LOWEST)
    total = tl.sum(tl.exp2(every - most), 0)
    acc = _weighed(found, size, part < used, most)
    for start in range(PART, used, PART):
        found, size = _found(partial, sizes, at, start + part, splits, dim, DIM)
        acc += _weighed(found, size, start + part < used, most)
    acc = acc / tl.where(used == 0, 1.0, total)
    column = tl.arange(0, WIDE)
    tl.store(out + row * out_row + head * DIM + column, acc.to(tl.bfloat16), column < DIM)


def decode(
    q: Tensor,
    cache: KvPages,
    page_table: Tensor,
    kv_lens: Tensor,
    softmax: Softmax,
    splits: int,
    workspace: Tensor,
    out: Tensor,
    *,
    native_codes: bool | None = None,
) -> None:
    """Attention of one query row per sequence: row s has position kv_lens[s] - 1. Rows with kv_lens 0 become zeros.

    q, out bfloat16 [S, heads, D], contiguous heads; cache bfloat16 or float8_e4m3fn; page_table int32
    [S, max_pages]; kv_lens int32 [S]; workspace float32 [attention_floats(S, heads, D, splits)] or more. native_codes:
    see kv_codes.kind_of.
    """
    check(q, cache, page_table, kv_lens, softmax, out)
    sequences, heads, dim = q.shape
    if len(kv_lens) != sequences:
        raise ValueError(f"there must be one query row per sequence, not {sequences} for {len(kv_lens)} sequences")
    floats = attention_floats(sequences, heads, dim, splits)
    if workspace.dtype is not torch.float32 or workspace.numel() < floats or not workspace.is_contiguous():
        raise ValueError(f"the workspace must be float32 [{floats}] or more, contiguous")
    if not sequences:
        return
    kv_heads = cache.keys.shape[2]
    sizes = workspace.view(-1)[sequences * heads * splits * dim :]
    constants, warps, stages = _decode_shape(heads // kv_heads, dim)
    _decode[(sequences, kv_heads, splits)](
        q, *elements(cache), page_table, kv_lens, softmax.sinks, workspace, sizes, heads, softmax.window or 0,
        softmax.scale * cache.key_scale, cache.value_scale, q.stride(0), page_table.stride(0),
        *cache.keys.stride()[:3], PAGE_TOKENS=cache.keys.shape[1], WINDOW=softmax.window is not None,
        SINKS=softmax.sinks is not None, KV=kind_of(cache, native_codes), **constants,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _combine[(sequences, heads)](
        workspace, sizes, kv_lens, out, heads, splits, softmax.window or 0, out.stride(0), DIM=dim,
        WIDE=constants["WIDE"], TOKENS=constants["TOKENS"], WINDOW=softmax.window is not None,
        SPLITS=max(MOST_SPLITS, triton.next_power_of_2(splits)), PART=PART,
    )  # fmt: skip


def _decode_shape(group: int, dim: int) -> tuple[dict[str, int], int, int]:
    """Constants, warps and stages. A tile of few heads is bound by memory, so it keeps many loads in flight."""
    wide = wide_of(dim)
    tile = max(16, triton.next_power_of_2(group))
    return {"GROUP": group, "DIM": dim, "WIDE": wide, "TILE": tile, "TOKENS": min(64, 8192 // wide)}, 4, 5


def variants() -> Iterator[Variant]:
    for group, dim, types, options, (oldest, newest) in cases():
        constants, warps, stages = _decode_shape(group, dim)
        outs = {"partial": "*fp32", "sizes": "*fp32", "heads": "i32"}
        aligned = ("q", "keys", "values", *STRIDES, "partial")
        yield Variant(_decode, types | outs, constants | options, warps, stages, aligned, oldest, newest=newest)
    for dim in (80, 256):
        shape = _decode_shape(1, dim)[0]
        combine: dict[str, object] = {"DIM": dim, "WIDE": shape["WIDE"], "TOKENS": shape["TOKENS"], "WINDOW": True}
        types = dict.fromkeys(("partial", "sizes"), "*fp32") | {"kv_lens": "*i32", "out": "*bf16"}
        types |= dict.fromkeys(("heads", "splits", "window", "out_row"), "i32")
        combine |= {"SPLITS": MOST_SPLITS, "PART": PART}
        yield Variant(_combine, types, combine, aligned=("partial", "out", "out_row"))
