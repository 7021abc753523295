"""Causal attention over a paged cache, with an online softmax in float32 (arXiv 1805.02867, 2205.14135).

A program's tile holds all query heads that share a KV head, so that K and V are read once for them. `decode` splits
each sequence's KV over several programs (split-KV) and combines their partial results; `prefill` has a tile per few
query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import KvPages
from proa.ops.sizes import FEW_SEQUENCES, MOST_HEAD_DIM, MOST_HEAD_GROUP, MOST_SPLITS, attention_floats
from proa.ops.triton.kv_codes import elements, kind_of, load_rows
from proa.ops.triton.variant import Variant

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # initial maximum: finite, so that no difference is NaN
PREFILL_TILE = MOST_HEAD_GROUP  # query rows x heads of a group
PART = 32  # splits combined at once


@dataclass(frozen=True)
class Softmax:
    """softmax(scale * q k) over the last `window` positions, the query's own included.

    sinks: float32 [heads], one extra logit per head in the softmax, without a value.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None


@triton.jit
def _attend(
    q, acc, most, total, keys, values, pages, first, last, seen, scale, page_stride, token_stride, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    KV: tl.constexpr,
):  # fmt: skip
    """Accumulate positions first <= p < last into the online softmax of a tile q [M, D]: acc [M, D], most [M] (running
    maximum), total [M] (running sum).

    seen [M]: last position that each row sees. Without MASKED, every row sees all positions and they are whole blocks.
    scale includes log2(e): exponentials have base 2.
    """
    dim = tl.arange(0, q.shape[1])[None, :]
    for start in range(first, last, TOKENS):
        position = start + tl.arange(0, TOKENS)
        here = dim < DIM
        if MASKED:
            here = (position < last)[:, None] & here
            page = tl.load(pages + position // PAGE_TOKENS, position < last, 0).to(tl.int64)
        else:
            page = tl.load(pages + position // PAGE_TOKENS).to(tl.int64)
        at = (page * page_stride + (position % PAGE_TOKENS) * token_stride)[:, None] + dim
        logits = tl.dot(q, tl.trans(load_rows(keys + at, here, KV))) * scale
        if MASKED:
            visible = (position[None, :] <= seen[:, None]) & (position < last)[None, :]
            if WINDOW:
                visible &= position[None, :] > seen[:, None] - window
            logits = tl.where(visible, logits, float("-inf"))
        more = tl.maximum(most, tl.max(logits, 1))
        weights = tl.exp2(logits - more[:, None])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.bfloat16), load_rows(values + at, here, KV), acc * shrink[:, None])
        most = more
    return acc, most, total


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
    acc, most, total = _attend(
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


@triton.jit
def rows_of_tile(index, q_starts, sequences, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Map a tile index to (sequence, its first row, its number of rows, the tile's first row in it). A tile is ROWS
    rows of one sequence; the tiles of sequence s are numbered from q_starts[s] // ROWS + s on."""
    s = tl.arange(0, SEQUENCES)
    before = (s < sequences) & (tl.load(q_starts + s, s < sequences, 0) // ROWS + s <= index)
    sequence = (tl.sum(before.to(tl.int32), 0) - 1).to(tl.int64)
    q_start = tl.load(q_starts + sequence)
    q_len = tl.load(q_starts + sequence + 1) - q_start
    return sequence, q_start, q_len, (index - q_start // ROWS - sequence.to(tl.int32)) * ROWS


@triton.jit(do_not_specialize=["sequences", "table_row"])  # vary from step to step
def _prefill(
    q, keys, values, page_table, q_starts, kv_lens, sinks, out, sizes, sequences, window, scale, value_scale,
    q_row, out_row, table_row, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SEQUENCES: tl.constexpr,
    KV: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """A tile is TILE // GROUP query rows. With SIZES, sizes [T, heads] gets log2 of the sums of exponentials."""
    ROWS: tl.constexpr = TILE // GROUP
    index, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the last rows read most
    sequence, q_start, q_len, first_row = rows_of_tile(index, q_starts, sequences, ROWS, SEQUENCES)
    if first_row >= q_len:
        return
    member = tl.arange(0, TILE)
    row = first_row + member // GROUP
    live = (row < q_len) & (member < ROWS * GROUP)
    head = kv_head * GROUP + member % GROUP
    past = tl.load(kv_lens + sequence) - q_len
    seen = past + tl.minimum(row, q_len - 1)
    lowest, end = past + first_row, past + tl.minimum(first_row + ROWS, q_len)
    begin = 0
    whole = 0  # from here to `lowest` no masking is needed
    if WINDOW:
        begin = tl.maximum(0, lowest - window + 1)
        whole = begin + tl.cdiv(tl.maximum(0, end - window - begin), TOKENS) * TOKENS
    whole_end = whole + tl.maximum(0, lowest + 1 - whole) // TOKENS * TOKENS
    dim = tl.arange(0, WIDE)[None, :]
    some = live[:, None] & (dim < DIM)
    token = (q_start + row).to(tl.int64)
    tile = tl.load(q + token[:, None] * q_row + head[:, None] * DIM + dim, some, 0.0)
    most, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    if SINKS:
        most = tl.maximum(tl.load(sinks + head, live, 0.0) * LOG2E, LOWEST)
        total += 1.0
    acc = tl.zeros([TILE, WIDE], tl.float32)
    pages = page_table + sequence * table_row
    keys += kv_head * head_stride
    values += kv_head * head_stride
    scale *= LOG2E
    if WINDOW:
        acc, most, total = _attend(
            tile, acc, most, total, keys, values, pages, begin, tl.minimum(whole, end), seen, scale,
            page_stride, token_stride, window, True, True, PAGE_TOKENS, DIM, TOKENS, KV,
        )  # fmt: skip
    acc, most, total = _attend(
        tile, acc, most, total, keys, values, pages, whole, whole_end, seen, scale,
        page_stride, token_stride, window, False, WINDOW, PAGE_TOKENS, DIM, TOKENS, KV,
    )  # fmt: skip
    acc, most, total = _attend(
        tile, acc, most, total, keys, values, pages, whole_end, end, seen, scale,
        page_stride, token_stride, window, True, WINDOW, PAGE_TOKENS, DIM, TOKENS, KV,
    )  # fmt: skip
    found = acc / total[:, None] * value_scale
    tl.store(out + token[:, None] * out_row + head[:, None] * DIM + dim, found.to(tl.bfloat16), some)
    if SIZES:
        tl.store(sizes + token * (GROUP * tl.num_programs(1)) + head, most + tl.log2(total), live)


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
    _check(q, cache, page_table, kv_lens, softmax, out)
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


def prefill(
    q: Tensor,
    cache: KvPages,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    softmax: Softmax,
    out: Tensor,
    sizes: Tensor | None = None,
    *,
    native_codes: bool | None = None,
) -> None:
    """Attention of q_starts[s + 1] - q_starts[s] query rows of each sequence s, the last at position kv_lens[s] - 1.

    q, out bfloat16 [T, heads, D], contiguous heads; cache bfloat16 or float8_e4m3fn; page_table int32
    [S, max_pages]; q_starts int32 [S + 1], starting at 0, non-decreasing; kv_lens int32 [S]. Rows of no sequence are
    not written. sizes float32 [T, heads], if given: gets log2 of each row's sum of exponentials.
    """
    _check(q, cache, page_table, kv_lens, softmax, out)
    rows, heads, dim = q.shape
    sequences, kv_heads = len(kv_lens), cache.keys.shape[2]
    if q_starts.shape != (sequences + 1,) or q_starts.dtype is not torch.int32:
        raise ValueError(f"q_starts must be int32 [{sequences + 1}], not {q_starts.dtype} {tuple(q_starts.shape)}")
    if sizes is not None and (sizes.shape != (rows, heads) or not sizes.is_contiguous()):
        raise ValueError(f"sizes must be contiguous [{rows}, {heads}], not {tuple(sizes.shape)} {sizes.stride()}")
    if not rows or not sequences:
        return
    constants, warps, stages = _prefill_shape(heads // kv_heads, dim)
    tiles = rows // (constants["TILE"] // constants["GROUP"]) + sequences
    _prefill[(tiles, kv_heads)](
        q, *elements(cache), page_table, q_starts, kv_lens, softmax.sinks, out, sizes, sequences, softmax.window or 0,
        softmax.scale * cache.key_scale, cache.value_scale, q.stride(0), out.stride(0), page_table.stride(0),
        *cache.keys.stride()[:3], PAGE_TOKENS=cache.keys.shape[1], WINDOW=softmax.window is not None,
        SINKS=softmax.sinks is not None, KV=kind_of(cache, native_codes), SIZES=sizes is not None,
        SEQUENCES=max(FEW_SEQUENCES, triton.next_power_of_2(sequences)), **constants,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _check(q: Tensor, cache: KvPages, page_table: Tensor, kv_lens: Tensor, softmax: Softmax, out: Tensor) -> None:
    heads, dim = q.shape[1:]
    kv_heads = cache.keys.shape[2]
    if heads % kv_heads or heads // kv_heads > PREFILL_TILE or cache.keys.shape[3] != dim:
        raise ValueError(f"q {tuple(q.shape)} does not fit a cache {tuple(cache.keys.shape)}")
    if dim > MOST_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MOST_HEAD_DIM}, not {dim}")
    if q.stride()[1:] != (dim, 1) or out.shape != q.shape or out.stride()[1:] != (dim, 1):
        raise ValueError(f"q {q.stride()} and out {tuple(out.shape)} {out.stride()} must have contiguous heads")
    if cache.keys.stride() != cache.values.stride() or cache.keys.stride(3) != 1:
        raise ValueError(f"strides of keys and values must agree: {cache.keys.stride()} and {cache.values.stride()}")
    if {page_table.dtype, kv_lens.dtype} != {torch.int32} or len(page_table) != len(kv_lens):
        lengths = f"{len(page_table)} and {len(kv_lens)}"
        raise ValueError(f"page_table and kv_lens must be int32 of one length, not {lengths}")
    if softmax.window is not None and softmax.window < 1:
        raise ValueError(f"a window must have at least 1 position, not {softmax.window}")
    sinks = softmax.sinks
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype is not torch.float32):
        raise ValueError(f"sinks must be float32 [{heads}], not {sinks.dtype} {tuple(sinks.shape)}")


def _decode_shape(group: int, dim: int) -> tuple[dict[str, int], int, int]:
    """Constants, warps and stages. A tile of few heads is bound by memory, so it keeps many loads in flight."""
    wide = max(16, triton.next_power_of_2(dim))
    tile = max(16, triton.next_power_of_2(group))
    return {"GROUP": group, "DIM": dim, "WIDE": wide, "TILE": tile, "TOKENS": min(64, 8192 // wide)}, 4, 5


def _prefill_shape(group: int, dim: int) -> tuple[dict[str, int], int, int]:
    wide = max(16, triton.next_power_of_2(dim))
    stages = 5 if wide <= 128 else 4  # 5 buffer two blocks of K and V; sm_86 to sm_120 have 99 KiB
    return {"GROUP": group, "DIM": dim, "WIDE": wide, "TILE": PREFILL_TILE, "TOKENS": min(64, 8192 // wide)}, 4, stages


def variants() -> Iterator[Variant]:
    strides = ("q_row", "page_stride", "token_stride", "head_stride")
    ints = dict.fromkeys(("page_table", "kv_lens"), "*i32") | dict.fromkeys((*strides, "table_row", "window"), "i32")
    common = ints | {"q": "*bf16", "scale": "fp32", "value_scale": "fp32"}
    aligned = ("q", "keys", "values", *strides)
    for group, dim, window, sinks, kv in (
        (1, 64, True, True, "bf16"),
        (12, 80, False, False, "bf16"),
        (8, 128, False, False, "bf16"),
        (32, 128, True, False, "bf16"),
        (8, 256, True, False, "bf16"),
        (8, 128, False, False, "e4m3"),
        (8, 256, True, False, "e4m3"),
        (8, 128, False, False, "e4m3 by bits"),
        (12, 80, True, False, "e4m3 by bits"),
    ):
        options: dict[str, object] = {"PAGE_TOKENS": 16, "WINDOW": window, "SINKS": sinks, "KV": kv}
        types = common | dict.fromkeys(("keys", "values"), "*bf16" if kv == "bf16" else "*u8")
        types |= {"sinks": "*fp32"} if sinks else {}
        oldest, newest = (89, None) if kv == "e4m3" else (75, 88 if kv == "e4m3 by bits" else None)
        options |= {} if sinks else {"sinks": None}
        constants, warps, stages = _decode_shape(group, dim)
        outs = {"partial": "*fp32", "sizes": "*fp32", "heads": "i32"}
        yield Variant(
            _decode, types | outs, constants | options, warps, stages, (*aligned, "partial"), oldest, newest=newest
        )
        constants, warps, stages = _prefill_shape(group, dim)
        outs = {"q_starts": "*i32", "out": "*bf16", "sequences": "i32", "out_row": "i32"}
        more = constants | options | {"SEQUENCES": FEW_SEQUENCES, "SIZES": False, "sizes": None}
        # D of 256 does not fit sm_75, and the other shapes take long to compile.
        least = oldest if group in (1, 8) and dim <= 128 else max(oldest, 80)
        aligned_outs = (*aligned, "out", "out_row")
        yield Variant(_prefill, types | outs, more, warps, stages, aligned_outs, least, newest=newest)
        if (group, dim, window) == (8, 128, False):  # attention in segments
            sized = {name: value for name, value in more.items() if name != "sizes"} | {"SIZES": True}
            outs = outs | {"sizes": "*fp32"}
            at_least = max(least, 80)
            yield Variant(
                _prefill, types | outs, sized, warps, stages, (*aligned_outs, "sizes"), at_least, newest=newest
            )
    for dim in (80, 256):
        shape = _decode_shape(1, dim)[0]
        combine: dict[str, object] = {"DIM": dim, "WIDE": shape["WIDE"], "TOKENS": shape["TOKENS"], "WINDOW": True}
        types = dict.fromkeys(("partial", "sizes"), "*fp32") | {"kv_lens": "*i32", "out": "*bf16"}
        types |= dict.fromkeys(("heads", "splits", "window", "out_row"), "i32")
        combine |= {"SPLITS": MOST_SPLITS, "PART": PART}
        yield Variant(_combine, types, combine, aligned=("partial", "out", "out_row"))
