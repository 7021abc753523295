"""Causal attention over a paged cache, with an online softmax in float32 (arXiv 1805.02867, 2205.14135).

A program's tile holds all query heads that share a KV head, so that K and V are read once for them. `decode` cuts each
sequence's past into splits, which fill the GPU, and weighs what they found; it can also norm and turn the rows, which
saves a kernel. `prefill` has a tile per few query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.table import Angles, KvPages, QkNorm
from proa.ops.triton.heads import check_rows, turned
from proa.ops.triton.variant import Variant

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # where a maximum begins: finite, so that no difference is NaN
PREFILL_TILE = 64  # query rows x heads of a group
MOST_SPLITS = 256
FEW_SEQUENCES = 256  # up to here one compiled kernel serves all numbers of sequences
PART_VALUES = 8192  # of splits that are weighed at once
MOST_DIM, DIM_UNIT = 256, 8  # of a head


@dataclass(frozen=True)
class Softmax:
    """softmax(scale * q k) over the last `window` positions, a query's own included.

    sinks float32 [heads]: a logit of each head that takes its share of the softmax and has no value.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None


@triton.jit
def _attend(
    q, acc, most, total, keys, values, pages, first, last, seen, scale, page_stride, token_stride, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Add positions first <= p < last to the state of a tile q [M, D]: acc [M, D], most [M], total [M].

    seen [M] is the last position that a row sees. Not MASKED: every row sees all, and they are whole blocks.
    scale includes log2(e): exponentials are of base 2.
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
        logits = tl.dot(q, tl.trans(tl.load(keys + at, here, 0.0))) * scale
        if MASKED:
            visible = (position[None, :] <= seen[:, None]) & (position < last)[None, :]
            if WINDOW:
                visible &= position[None, :] > seen[:, None] - window
            logits = tl.where(visible, logits, float("-inf"))
        more = tl.maximum(most, tl.max(logits, 1))
        weights = tl.exp2(logits - more[:, None])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.bfloat16), tl.load(values + at, here, 0.0), acc * shrink[:, None])
        most = more
    return acc, most, total


@triton.jit
def _range_and_share(kv_len, splits, window, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Where the positions begin that a decoded row sees, and how many of them a split takes: whole blocks."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, kv_len - window)
    return begin, tl.cdiv(tl.cdiv(kv_len - begin, splits), TOKENS) * TOKENS


@triton.jit
def _newest(
    mine, kv, k_norm, cos, sin, slots, keys, values, sequence, kv_head, kv_heads, eps, offset,
    kv_row, page_stride, token_stride,
    PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The row's key, normed and turned, and its value, which go to its slot if they are `mine`: loads come first."""
    dim = tl.arange(0, WIDE)[None, :]
    source = kv + sequence * kv_row + kv_head * DIM + tl.zeros([1, 1], tl.int32)
    key = turned(
        source,
        dim,
        dim < DIM,
        cos + sequence * HALF,
        sin + sequence * HALF,
        k_norm,
        eps,
        offset,
        DIM,
        HALF,
        INTERLEAVED,
        NORM,
    )
    value = tl.load(source + kv_heads * DIM + dim, dim < DIM)
    slot = tl.load(slots + sequence)
    at = (slot // PAGE_TOKENS) * page_stride + (slot % PAGE_TOKENS) * token_stride + dim
    if mine:
        tl.store(keys + at, key, dim < DIM)
        tl.store(values + at, value, dim < DIM)
        tl.debug_barrier()  # what follows reads them


@triton.jit
def _weigh(
    partial, sizes, sequence, heads, head, mine, splits, used,
    DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What `used` splits of a tile of heads found, weighed: [TILE, WIDE]. Sizes are log2 of their sums of exponentials,
    which may be far apart, so that weights are of the largest one's size."""
    dim = tl.arange(0, WIDE)[None, None, :]
    most, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, WIDE], tl.float32)
    for start in range(0, used, PART):
        part = start + tl.arange(0, PART)
        there = (part < used)[:, None] & mine[None, :]
        at = (sequence * heads + head)[None, :] * splits + part[:, None]
        # past this multiprocessor's cache: other programs wrote these
        size = tl.load(sizes + at, there, float("-inf"), cache_modifier=".cg")
        found = tl.load(
            partial + at[:, :, None] * DIM + dim, there[:, :, None] & (dim < DIM), 0.0, cache_modifier=".cg"
        )
        more = tl.maximum(most, tl.max(size, 0))
        weight, shrink = tl.exp2(size - more[None, :]), tl.exp2(most - more)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * found, 0)
        most = more
    return acc / tl.where(mine, total, 1.0)[:, None]


@triton.jit
def _decode(
    q, kv, q_norm, k_norm, cos, sin, slots, keys, values, page_table, kv_lens, sinks, partial, sizes, arrived, out,
    heads, window, scale, eps, offset,
    q_row, q_head, kv_row, out_row, table_row, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PART: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A split of a sequence's past, for the heads of a group. Of a group's splits the last to arrive weighs all.

    kv given: q is still to be normed and turned, and so is the newest key, which the split that reads it stores.
    """
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
    member = tl.arange(0, TILE)
    head = kv_head * GROUP + member
    mine = member < GROUP
    dim = tl.arange(0, WIDE)[None, :]
    some = mine[:, None] & (dim < DIM)
    to = out + sequence * out_row + head[:, None] * DIM + dim
    kv_len = tl.load(kv_lens + sequence)
    begin, share = _range_and_share(kv_len, splits, window, TOKENS, WINDOW)
    first = begin + split * share
    last = tl.minimum(kv_len, first + share)
    if first >= last:
        if split == 0:  # there is no past, not of this row either: padding
            tl.store(to, tl.zeros([TILE, WIDE], tl.bfloat16), some)
        return
    keys += kv_head * head_stride
    values += kv_head * head_stride
    source = q + sequence * q_row + head[:, None] * q_head
    if kv is None:
        tile = tl.load(source + dim, some, 0.0)
    else:
        tile = turned(
            source, dim, some, cos + sequence * HALF, sin + sequence * HALF, q_norm, eps, offset,
            DIM, HALF, INTERLEAVED, NORM,
        )  # fmt: skip
        _newest(
            last == kv_len, kv, k_norm, cos, sin, slots, keys, values, sequence, kv_head, kv_heads, eps, offset,
            kv_row, page_stride, token_stride, PAGE_TOKENS, DIM, WIDE, HALF, INTERLEAVED, NORM,
        )  # fmt: skip
    most, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    if SINKS:  # noqa: SIM102 - a constant decides here, the device below
        if split == 0:
            most = tl.maximum(tl.load(sinks + head, mine, 0.0) * LOG2E, LOWEST)
            total += 1.0
    acc, most, total = _attend(
        tile, tl.zeros([TILE, WIDE], tl.float32), most, total, keys, values, page_table + sequence * table_row,
        first, last, tl.full([TILE], 2**31 - 1, tl.int32), scale * LOG2E, page_stride, token_stride, window,
        True, False, PAGE_TOKENS, DIM, TOKENS,
    )  # fmt: skip
    acc = acc / total[:, None]
    used = tl.cdiv(kv_len - begin, share)
    if used == 1:
        tl.store(to, acc.to(tl.bfloat16), some)
        return
    at = (sequence * heads + head) * splits + split
    tl.store(partial + at[:, None] * DIM + dim, acc, some)
    tl.store(sizes + at, most + tl.log2(total), mine)
    tl.debug_barrier()  # the arrival tells of all threads' stores
    counter = arrived + sequence * kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
        tl.store(counter, 0)
        every = _weigh(partial, sizes, sequence, heads, head, mine, splits, used, DIM, WIDE, TILE, PART)
        tl.store(to, every.to(tl.bfloat16), some)


@triton.jit(do_not_specialize=["sequences"])  # which differs from step to step
def _prefill(
    q, keys, values, page_table, q_starts, kv_lens, sinks, out, sequences, window, scale,
    q_row, out_row, table_row, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A tile is TILE // GROUP query rows; those of sequence s have the numbers from q_starts[s] // ROWS + s on."""
    ROWS: tl.constexpr = TILE // GROUP
    index, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the last rows have most to read
    s = tl.arange(0, SEQUENCES)
    before = (s < sequences) & (tl.load(q_starts + s, s < sequences, 0) // ROWS + s <= index)
    sequence = (tl.sum(before.to(tl.int32), 0) - 1).to(tl.int64)
    q_start = tl.load(q_starts + sequence)
    q_len = tl.load(q_starts + sequence + 1) - q_start
    first_row = (index - q_start // ROWS - sequence.to(tl.int32)) * ROWS
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
    whole = 0  # from here to `lowest` every row sees everything
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
            page_stride, token_stride, window, True, True, PAGE_TOKENS, DIM, TOKENS,
        )  # fmt: skip
    acc, most, total = _attend(
        tile, acc, most, total, keys, values, pages, whole, whole_end, seen, scale,
        page_stride, token_stride, window, False, WINDOW, PAGE_TOKENS, DIM, TOKENS,
    )  # fmt: skip
    acc, most, total = _attend(
        tile, acc, most, total, keys, values, pages, whole_end, end, seen, scale,
        page_stride, token_stride, window, True, WINDOW, PAGE_TOKENS, DIM, TOKENS,
    )  # fmt: skip
    tl.store(out + token[:, None] * out_row + head[:, None] * DIM + dim, (acc / total[:, None]).to(tl.bfloat16), some)


def splits_for(sequences: int, kv_heads: int, processors: int) -> int:
    """How many parts a sequence's past is cut into: one sequence alone shall keep every multiprocessor busy, and short
    ones that share a batch with it shall not cost many empty programs.
    """
    alone = -(-2 * processors // kv_heads)
    together = -(-8 * processors // (sequences * kv_heads))
    return max(1, min(alone, together, MOST_SPLITS))


@dataclass(frozen=True)
class Space:
    """Memory between the programs of `decode`, whose calls follow one another."""

    partial: Tensor  # float32 [partial_floats(...)] or more
    arrived: Tensor  # int32 [sequences * kv_heads] or more, 0 between calls


def partial_floats(sequences: int, heads: int, dim: int, splits: int) -> int:
    """How many float32 the workspace of `decode` has."""
    return sequences * heads * splits * (dim + 1)


@dataclass(frozen=True)
class Newest:
    """The rows' own keys and values, and how they and q are normed and turned: as `rotate_store` of heads.py has it."""

    kv: Tensor  # bfloat16 [S, 2 * kv_heads, D]: k and v, each row whole
    norm: QkNorm | None
    angles: Angles
    slots: Tensor  # int64 [S]


def decode(
    q: Tensor,
    cache: KvPages,
    page_table: Tensor,
    kv_lens: Tensor,
    softmax: Softmax,
    splits: int,
    space: Space,
    out: Tensor,
    newest: Newest | None = None,
) -> None:
    """Attention of one query row per sequence: row s is at position kv_lens[s] - 1. Rows of kv_lens 0 become zeros.

    q, out bfloat16 [S, heads, D], heads side by side; page_table int32 [S, max_pages]; kv_lens int32 [S]. With `newest`
    q is normed and turned first, and its heads may lie apart; the newest keys and values are stored, and seen.
    """
    _check(q, cache, page_table, kv_lens, softmax, out, apart=newest is not None)
    sequences, heads, dim = q.shape
    kv_heads = cache.keys.shape[2]
    if len(kv_lens) != sequences:
        raise ValueError(f"{sequences} query rows for {len(kv_lens)} sequences")
    if newest is not None:
        check_rows(q, newest.kv, newest.angles, cache, newest.slots)
    _check_space(space, partial_floats(sequences, heads, dim, splits), sequences * kv_heads)
    if not sequences:
        return
    sizes = space.partial.view(-1)[sequences * heads * splits * dim :]
    constants, warps, stages = _decode_shape(heads // kv_heads, dim)
    kv, norm, angles, slots = (None,) * 4 if newest is None else (
        newest.kv, newest.norm, newest.angles, newest.slots
    )  # fmt: skip
    weights, numbers = ((None, None), (0.0, 0.0)) if norm is None else ((norm.q, norm.k), (norm.eps, norm.offset))
    cos, sin, turns = (None, None, (0, False)) if angles is None else (
        angles.cos, angles.sin, (angles.cos.shape[1], angles.interleaved)
    )  # fmt: skip
    _decode[(sequences, kv_heads, splits)](
        q, kv, *weights, cos, sin, slots, cache.keys, cache.values, page_table, kv_lens, softmax.sinks, space.partial,
        sizes, space.arrived, out, heads, softmax.window or 0, softmax.scale, *numbers, *q.stride()[:2],
        0 if kv is None else kv.stride(0), out.stride(0), page_table.stride(0), *cache.keys.stride()[:3],
        PAGE_TOKENS=cache.keys.shape[1], WINDOW=softmax.window is not None, SINKS=softmax.sinks is not None,
        HALF=turns[0], INTERLEAVED=turns[1], NORM=norm is not None, **constants, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def prefill(
    q: Tensor,
    cache: KvPages,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    softmax: Softmax,
    out: Tensor,
) -> None:
    """Attention of q_starts[s + 1] - q_starts[s] query rows of each sequence s, the last at position kv_lens[s] - 1.

    q, out bfloat16 [T, heads, D], heads side by side; page_table int32 [S, max_pages]; q_starts int32 [S + 1], from
    0 on, not falling; kv_lens int32 [S]. Rows of no sequence are not written.
    """
    _check(q, cache, page_table, kv_lens, softmax, out)
    rows, heads, dim = q.shape
    sequences, kv_heads = len(kv_lens), cache.keys.shape[2]
    if q_starts.shape != (sequences + 1,) or q_starts.dtype is not torch.int32:
        raise ValueError(f"q_starts is int32 [{sequences + 1}], not {q_starts.dtype} {tuple(q_starts.shape)}")
    if not rows or not sequences:
        return
    constants, warps, stages = _prefill_shape(heads // kv_heads, dim)
    tiles = rows // (constants["TILE"] // constants["GROUP"]) + sequences
    _prefill[(tiles, kv_heads)](
        q, cache.keys, cache.values, page_table, q_starts, kv_lens, softmax.sinks, out, sequences, softmax.window or 0,
        softmax.scale, q.stride(0), out.stride(0), page_table.stride(0), *cache.keys.stride()[:3],
        PAGE_TOKENS=cache.keys.shape[1], WINDOW=softmax.window is not None, SINKS=softmax.sinks is not None,
        SEQUENCES=max(FEW_SEQUENCES, triton.next_power_of_2(sequences)), **constants,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _check_space(space: Space, floats: int, counters: int) -> None:
    for tensor, dtype, least in ((space.partial, torch.float32, floats), (space.arrived, torch.int32, counters)):
        if tensor.dtype is not dtype or tensor.numel() < least or not tensor.is_contiguous():
            raise ValueError(f"the workspace is {dtype} [{least}] or more, contiguous, not {tuple(tensor.shape)}")


def _check(
    q: Tensor, cache: KvPages, page_table: Tensor, kv_lens: Tensor, softmax: Softmax, out: Tensor, apart: bool = False
) -> None:  # fmt: skip
    heads, dim = q.shape[1:]
    kv_heads = cache.keys.shape[2]
    if heads % kv_heads or heads // kv_heads > PREFILL_TILE or cache.keys.shape[3] != dim:
        raise ValueError(f"q {tuple(q.shape)} does not go with a cache {tuple(cache.keys.shape)}")
    if dim % DIM_UNIT or dim > MOST_DIM:
        raise ValueError(f"heads of {dim} values: multiples of {DIM_UNIT} up to {MOST_DIM}")
    if (q.stride(1) != dim and not apart) or q.stride(2) != 1 or out.shape != q.shape or out.stride()[1:] != (dim, 1):
        raise ValueError(f"q {q.stride()} and out {tuple(out.shape)} {out.stride()} must have whole heads side by side")
    if cache.keys.stride() != cache.values.stride() or cache.keys.stride(3) != 1:
        raise ValueError(f"keys and values lie differently: {cache.keys.stride()} and {cache.values.stride()}")
    if {page_table.dtype, kv_lens.dtype} != {torch.int32} or len(page_table) != len(kv_lens):
        raise ValueError(f"page_table and kv_lens are int32 of one length, not {len(page_table)} and {len(kv_lens)}")
    if softmax.window is not None and softmax.window < 1:
        raise ValueError(f"a window has at least 1 position, not {softmax.window}")
    sinks = softmax.sinks
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype is not torch.float32):
        raise ValueError(f"sinks are float32 [{heads}], not {sinks.dtype} {tuple(sinks.shape)}")


def _decode_shape(group: int, dim: int) -> tuple[dict[str, int], int, int]:
    """Constants, warps and stages. A tile of few heads reads as fast as it can: many bytes on their way."""
    wide = max(16, triton.next_power_of_2(dim))
    tile = max(16, triton.next_power_of_2(group))
    constants = {"GROUP": group, "DIM": dim, "WIDE": wide, "TILE": tile, "TOKENS": min(64, 8192 // wide)}
    return constants | {"PART": max(1, PART_VALUES // (tile * wide))}, 4, 5


def _prefill_shape(group: int, dim: int) -> tuple[dict[str, int], int, int]:
    wide = max(16, triton.next_power_of_2(dim))
    stages = 5 if wide <= 128 else 4  # 5 keep two blocks of K and V; sm_86 to sm_120 have 99 KiB
    return {"GROUP": group, "DIM": dim, "WIDE": wide, "TILE": PREFILL_TILE, "TOKENS": min(64, 8192 // wide)}, 4, stages


def variants() -> Iterator[Variant]:
    strides = ("q_row", "page_stride", "token_stride", "head_stride")
    bf16 = dict.fromkeys(("q", "keys", "values"), "*bf16")
    ints = dict.fromkeys(("page_table", "kv_lens"), "*i32") | dict.fromkeys((*strides, "table_row", "window"), "i32")
    common = bf16 | ints | {"scale": "fp32", "out": "*bf16", "out_row": "i32"}
    aligned = ("q", "keys", "values", "out", "out_row", *strides)
    for group, dim, window, sinks, turned_too in (
        (1, 64, True, True, False),
        (12, 80, False, False, False),
        (8, 128, False, False, True),
        (32, 128, True, False, False),
        (8, 256, True, False, True),
    ):
        options: dict[str, object] = {"PAGE_TOKENS": 16, "WINDOW": window, "SINKS": sinks}
        types = common | ({"sinks": "*fp32"} if sinks else {})
        options |= {} if sinks else {"sinks": None}
        constants, warps, stages = _decode_shape(group, dim)
        own = {"partial": "*fp32", "sizes": "*fp32", "arrived": "*i32", "heads": "i32", "q_head": "i32"}
        newest = dict.fromkeys(("kv", "q_norm", "k_norm"), "*bf16") | {"cos": "*fp32", "sin": "*fp32", "slots": "*i64"}
        own |= {"kv_row": "i32", "eps": "fp32", "offset": "fp32"} | (newest if turned_too else {})
        half = {"HALF": dim // 2 if turned_too else 0, "INTERLEAVED": False, "NORM": turned_too}
        absent = {} if turned_too else dict.fromkeys(newest)
        more = constants | options | half | absent
        hints = (*aligned, "partial", "q_head", "kv_row", *(("kv",) if turned_too else ()))
        yield Variant(_decode, types | own, more, warps, stages, hints)
        constants, warps, stages = _prefill_shape(group, dim)
        own = {"q_starts": "*i32", "sequences": "i32"}
        more = constants | options | {"SEQUENCES": FEW_SEQUENCES}
        least = 75 if group in (1, 8) and dim <= 128 else 80  # D of 256 is too much for sm_75, and the others take long
        yield Variant(_prefill, types | own, more, warps, stages, aligned, least)
