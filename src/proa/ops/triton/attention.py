"""Causal attention of prompts over a paged cache, with an online softmax in float32 (arXiv 1805.02867, 2205.14135).

A program's tile holds a few query rows, and all query heads that share a KV head, so that K and V are read once for
them. If tiles are fewer than the GPU's processors, several programs share the positions of a tile (split-KV).
attention_decode.py has one row for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import KvPages
from proa.ops.sizes import (
    FEW_SEQUENCES,
    MOST_HEAD_DIM,
    MOST_HEAD_GROUP,
    MOST_PROMPT_SPLITS,
)
from proa.ops.triton.kv_codes import elements, kind_of, load_rows
from proa.ops.triton.variant import Variant

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # initial maximum: finite, so that no difference is NaN
LEAST_SUM: tl.constexpr = tl.constexpr(1e-30)  # below every sum of exponentials, which are 1 at their maximum
PREFILL_TILE = MOST_HEAD_GROUP  # query rows x heads of a group
STRIDES = ("q_row", "page_stride", "token_stride", "head_stride")  # arguments of the kernels
LEAST_SHARE = 256  # positions of a split of a tile: below, combining costs more than is gained


@dataclass(frozen=True)
class Softmax:
    """softmax(scale * q k) over the last `window` positions, the query's own included.

    sinks: float32 [heads], one extra logit per head in the softmax, without a value.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None


@triton.jit
def attend(
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
def rows_of_tile(index, q_starts, sequences, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Map a tile index to (sequence, its first row, its number of rows, the tile's first row in it). A tile is ROWS
    rows of one sequence; the tiles of sequence s are numbered from q_starts[s] // ROWS + s on."""
    s = tl.arange(0, SEQUENCES)
    before = (s < sequences) & (tl.load(q_starts + s, s < sequences, 0) // ROWS + s <= index)
    sequence = (tl.sum(before.to(tl.int32), 0) - 1).to(tl.int64)
    q_start = tl.load(q_starts + sequence)
    q_len = tl.load(q_starts + sequence + 1) - q_start
    return sequence, q_start, q_len, (index - q_start // ROWS - sequence.to(tl.int32)) * ROWS


@triton.jit
def _own_share(begin, whole, whole_end, end, TOKENS: tl.constexpr, LEAST: tl.constexpr):
    """The range of a tile's positions that this of its programs computes, with the limits of blocks without a mask."""
    share = tl.maximum(LEAST, tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), TOKENS) * TOKENS)
    begin += tl.program_id(2) * share
    end = tl.minimum(end, begin + share)
    whole = tl.minimum(tl.maximum(whole, begin), end)
    return begin, whole, tl.maximum(whole, tl.minimum(whole_end, end)), end


@triton.jit
def _attend_range(
    tile, acc, most, total, keys, values, pages, begin, whole, whole_end, end, seen, scale, page_stride, token_stride,
    window, WINDOW: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """`attend` to begin <= p < end, without a mask from whole to whole_end."""
    if WINDOW:
        acc, most, total = attend(
            tile, acc, most, total, keys, values, pages, begin, tl.minimum(whole, end), seen, scale,
            page_stride, token_stride, window, True, True, PAGE_TOKENS, DIM, TOKENS, KV,
        )  # fmt: skip
    acc, most, total = attend(
        tile, acc, most, total, keys, values, pages, whole, whole_end, seen, scale,
        page_stride, token_stride, window, False, WINDOW, PAGE_TOKENS, DIM, TOKENS, KV,
    )  # fmt: skip
    return attend(
        tile,
        acc,
        most,
        total,
        keys,
        values,
        pages,
        whole_end,
        end,
        seen,
        scale,
        page_stride,
        token_stride,
        window,
        True,
        WINDOW,
        PAGE_TOKENS,
        DIM,
        TOKENS,
        KV,
    )


@triton.jit(do_not_specialize=["sequences", "table_row"])  # vary from step to step
def _prefill(
    q, keys, values, page_table, q_starts, kv_lens, sinks, out, sizes, sequences, window, scale, value_scale,
    q_row, out_row, table_row, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SEQUENCES: tl.constexpr,
    KV: tl.constexpr, SIZES: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A tile is TILE // GROUP query rows. With SIZES, sizes [T, heads] gets log2 of the sums of exponentials. With
    SPLIT, a program computes its share of the tile's positions, at least LEAST: float32 out [T, heads, splits, D] and
    sizes [T, heads, splits], -inf where a row sees no position of the share."""
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
    token = (q_start + row).to(tl.int64)
    if SPLIT:
        begin, whole, whole_end, end = _own_share(begin, whole, whole_end, end, TOKENS, LEAST)
        result = (token * (GROUP * tl.num_programs(1)) + head) * tl.num_programs(2) + tl.program_id(2)
        if begin >= end:
            tl.store(sizes + result, tl.full([TILE], float("-inf"), tl.float32), live)
            return
    dim = tl.arange(0, WIDE)[None, :]
    some = live[:, None] & (dim < DIM)
    tile = tl.load(q + token[:, None] * q_row + head[:, None] * DIM + dim, some, 0.0)
    most, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    if SINKS:  # noqa: SIM102 - decided when compiling, unlike the next one
        if tl.program_id(2) == 0:
            most = tl.maximum(tl.load(sinks + head, live, 0.0) * LOG2E, LOWEST)
            total += 1.0
    acc = tl.zeros([TILE, WIDE], tl.float32)
    pages = page_table + sequence * table_row
    keys += kv_head * head_stride
    values += kv_head * head_stride
    acc, most, total = _attend_range(
        tile, acc, most, total, keys, values, pages, begin, whole, whole_end, end, seen, scale * LOG2E,
        page_stride, token_stride, window, WINDOW, PAGE_TOKENS, DIM, TOKENS, KV,
    )  # fmt: skip
    if SPLIT:
        size = tl.where(total > 0, most + tl.log2(tl.maximum(total, LEAST_SUM)), float("-inf"))
        tl.store(out + result[:, None] * DIM + dim, acc / tl.maximum(total, LEAST_SUM)[:, None] * value_scale, some)
        tl.store(sizes + result, size, live)
    else:
        found = acc / total[:, None] * value_scale
        tl.store(out + token[:, None] * out_row + head[:, None] * DIM + dim, found.to(tl.bfloat16), some)
    if SIZES:
        tl.store(sizes + token * (GROUP * tl.num_programs(1)) + head, most + tl.log2(total), live)


@triton.jit(do_not_specialize=["sequences", "splits"])  # vary from step to step
def _combine_rows(
    partial, sizes, q_starts, out, sequences, splits, out_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a row and head of _prefill."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(q_starts + sequences):
        return
    at = (row * HEADS + head) * splits
    split, dim = tl.arange(0, SPLITS), tl.arange(0, WIDE)[None, :]
    size = tl.load(sizes + at + split, split < splits, float("-inf"))
    most = tl.max(size, 0)  # each row sees its own position, so not -inf
    weight = tl.exp2(size - most)
    written = (size > float("-inf"))[:, None] & (dim < DIM)
    found = tl.load(partial + (at + split)[:, None] * DIM + dim, written, 0.0)
    acc = tl.sum(weight[:, None] * found, 0) / tl.sum(weight, 0)
    column = tl.arange(0, WIDE)
    tl.store(out + row * out_row + head * DIM + column, acc.to(tl.bfloat16), column < DIM)


@dataclass(frozen=True)
class _Rows:
    q: Tensor
    cache: KvPages
    page_table: Tensor
    q_starts: Tensor
    kv_lens: Tensor


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
    check(q, cache, page_table, kv_lens, softmax, out)
    rows, heads, _ = q.shape
    if sizes is not None and (sizes.shape != (rows, heads) or not sizes.is_contiguous()):
        raise ValueError(f"sizes must be contiguous [{rows}, {heads}], not {tuple(sizes.shape)} {sizes.stride()}")
    _launch_prefill(_Rows(q, cache, page_table, q_starts, kv_lens), softmax, out, sizes, 1, native_codes)


def prefill_in_splits(
    q: Tensor,
    cache: KvPages,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    softmax: Softmax,
    splits: int,
    out: Tensor,
    *,
    native_codes: bool | None = None,
) -> None:
    """As `prefill`; `splits` programs, 1 to MOST_PROMPT_SPLITS, share a tile's positions (sizes.prompt_splits)."""
    check(q, cache, page_table, kv_lens, softmax, out)
    if not 1 <= splits <= MOST_PROMPT_SPLITS:
        raise ValueError(f"splits must be 1 to {MOST_PROMPT_SPLITS}, not {splits}")
    (rows, heads, dim), of = q.shape, _Rows(q, cache, page_table, q_starts, kv_lens)
    if splits == 1 or not rows:
        _launch_prefill(of, softmax, out, None, 1, native_codes)
        return
    partial = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
    sizes = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    _launch_prefill(of, softmax, partial, sizes, splits, native_codes)
    _combine_rows[(rows, heads)](
        partial, sizes, q_starts, out, len(kv_lens), splits, out.stride(0), HEADS=heads, DIM=dim,
        WIDE=wide_of(dim), SPLITS=MOST_PROMPT_SPLITS, num_warps=1,
    )  # fmt: skip


def _launch_prefill(
    of: _Rows, softmax: Softmax, out: Tensor, sizes: Tensor | None, splits: int, native_codes: bool | None
) -> None:
    q, cache, page_table = of.q, of.cache, of.page_table
    rows, heads, dim = q.shape
    sequences, kv_heads = len(of.kv_lens), cache.keys.shape[2]
    if of.q_starts.shape != (sequences + 1,) or of.q_starts.dtype is not torch.int32:
        found = f"{of.q_starts.dtype} {tuple(of.q_starts.shape)}"
        raise ValueError(f"q_starts must be int32 [{sequences + 1}], not {found}")
    if not rows or not sequences:
        return
    constants, warps, stages = _prefill_shape(heads // kv_heads, dim)
    tiles = rows // (constants["TILE"] // constants["GROUP"]) + sequences
    _prefill[(tiles, kv_heads, splits)](
        q, *elements(cache), page_table, of.q_starts, of.kv_lens, softmax.sinks, out, sizes, sequences,
        softmax.window or 0, softmax.scale * cache.key_scale, cache.value_scale, q.stride(0), out.stride(0),
        page_table.stride(0), *cache.keys.stride()[:3], PAGE_TOKENS=cache.keys.shape[1],
        WINDOW=softmax.window is not None, SINKS=softmax.sinks is not None, KV=kind_of(cache, native_codes),
        SIZES=sizes is not None and splits == 1, SPLIT=splits > 1, LEAST=LEAST_SHARE,
        SEQUENCES=max(FEW_SEQUENCES, triton.next_power_of_2(sequences)), **constants,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def check(q: Tensor, cache: KvPages, page_table: Tensor, kv_lens: Tensor, softmax: Softmax, out: Tensor) -> None:
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


def wide_of(dim: int) -> int:
    """Columns of a tile for heads of `dim` dimensions."""
    wide: int = triton.next_power_of_2(dim)
    return max(16, wide)


def _prefill_shape(group: int, dim: int) -> tuple[dict[str, int], int, int]:
    wide = wide_of(dim)
    stages = 5 if wide <= 128 else 4  # 5 buffer two blocks of K and V; sm_86 to sm_120 have 99 KiB
    return {"GROUP": group, "DIM": dim, "WIDE": wide, "TILE": PREFILL_TILE, "TOKENS": min(64, 8192 // wide)}, 4, stages


def cases() -> Iterator[tuple[int, int, dict[str, str], dict[str, object], tuple[int, int | None]]]:
    """(heads of a group, head dimension, types, constants, oldest and newest compute capability) of the kernels."""
    ints = dict.fromkeys(("page_table", "kv_lens"), "*i32") | dict.fromkeys((*STRIDES, "table_row", "window"), "i32")
    common = ints | {"q": "*bf16", "scale": "fp32", "value_scale": "fp32"}
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
        options |= {} if sinks else {"sinks": None}
        yield group, dim, types, options, (89, None) if kv == "e4m3" else (75, 88 if kv == "e4m3 by bits" else None)


def variants() -> Iterator[Variant]:
    for group, dim, types, options, (oldest, newest) in cases():
        constants, warps, stages = _prefill_shape(group, dim)
        outs = {"q_starts": "*i32", "out": "*bf16", "sequences": "i32", "out_row": "i32"}
        more = constants | options | {"SEQUENCES": FEW_SEQUENCES, "LEAST": LEAST_SHARE}
        # D of 256 does not fit sm_75, and the other shapes take long to compile.
        least = oldest if group in (1, 8) and dim <= 128 else max(oldest, 80)
        aligned: tuple[str, ...] = ("q", "keys", "values", *STRIDES, "out", "out_row")
        plain = more | {"SIZES": False, "SPLIT": False, "sizes": None}
        yield Variant(_prefill, types | outs, plain, warps, stages, aligned, least, newest=newest)
        outs = outs | {"sizes": "*fp32"}
        aligned = (*aligned, "sizes")
        if (group, dim, options["WINDOW"]) == (8, 128, False):  # attention in segments
            sized = more | {"SIZES": True, "SPLIT": False}
            yield Variant(_prefill, types | outs, sized, warps, stages, aligned, max(least, 80), newest=newest)
        if options["KV"] == "bf16" and group != 32:  # few rows behind a long past
            cut = more | {"SIZES": False, "SPLIT": True}
            yield Variant(_prefill, types | outs | {"out": "*fp32"}, cut, warps, stages, aligned, least)
    for heads, dim in ((32, 128), (12, 80), (16, 256)):
        rows: dict[str, object] = {"HEADS": heads, "DIM": dim, "WIDE": wide_of(dim), "SPLITS": MOST_PROMPT_SPLITS}
        types = dict.fromkeys(("partial", "sizes"), "*fp32") | {"q_starts": "*i32", "out": "*bf16"}
        types |= dict.fromkeys(("sequences", "splits", "out_row"), "i32")
        yield Variant(_combine_rows, types, rows, warps=1, aligned=("partial", "out", "out_row"))
