"""Causal attention of many heads over one paged latent (arXiv 2405.04434), with an online softmax in float32.

A token's row in the cache is the key of all heads, and its first part, the latent, their value: it is read once for a
tile of heads. `decode` splits each sequence's KV over several programs (split-KV) and combines their partial results;
`prefill` has a tile per few query rows and heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import LatentPages
from proa.ops.sizes import (
    FEW_SEQUENCES,
    LATENT_HEADS,
    MOST_LATENT_KEY,
    MOST_LATENT_RANK,
    MOST_SPLITS,
    attention_floats,
    latent_splits,
)
from proa.ops.triton.attention import LOG2E, LOWEST, rows_of_tile
from proa.ops.triton.variant import Variant

LEAST_SHARE = 64  # fewest tokens of a split: its partial result per head is as long as four of them
PART, COLUMNS = 16, 128  # splits, and columns of the latent, combined at once
# Shared memory per thread block from which on tiles are large, and have more blocks in flight.
LARGE_KIB, LARGEST_KIB = 160, 200


@dataclass(frozen=True)
class TileShape:
    """Query rows x heads per tile, tokens per block, and how it is compiled."""

    tile: int
    tokens: int
    warps: int
    stages: int


@triton.jit
def _attend(
    q, q_key, acc, most, total, rows, pages, first, last, seen, scale, page_stride, token_stride,
    MASKED: tl.constexpr, PAGE_TOKENS: tl.constexpr, RANK: tl.constexpr, KEY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Accumulate positions first <= p < last into the online softmax of a tile q [M, D], q_key [M, R]: acc [M, D],
    most [M] (running maximum), total [M] (running sum).

    seen [M]: last position that each row sees. Without MASKED, every row sees all positions and they are whole blocks.
    scale includes log2(e): exponentials have base 2.
    """
    dim, rotary = tl.arange(0, q.shape[1])[None, :], tl.arange(0, q_key.shape[1])[None, :]
    for start in range(first, last, TOKENS):
        position = start + tl.arange(0, TOKENS)
        if MASKED:
            here = (position < last)[:, None]
            page = tl.load(pages + position // PAGE_TOKENS, position < last, 0).to(tl.int64)
            at = rows + (page * page_stride + (position % PAGE_TOKENS) * token_stride)[:, None]
            latents = tl.load(at + dim, here & (dim < RANK), 0.0)
            keys = tl.load(at + RANK + rotary, here & (rotary < KEY), 0.0)
        else:
            page = tl.load(pages + position // PAGE_TOKENS).to(tl.int64)
            at = rows + (page * page_stride + (position % PAGE_TOKENS) * token_stride)[:, None]
            latents = tl.load(at + dim, dim < RANK, 0.0)
            keys = tl.load(at + RANK + rotary, rotary < KEY, 0.0)
        logits = tl.dot(q_key, tl.trans(keys))
        logits = tl.dot(q, tl.trans(latents), logits) * scale
        if MASKED:
            visible = (position[None, :] <= seen[:, None]) & (position < last)[None, :]
            logits = tl.where(visible, logits, float("-inf"))
        more = tl.maximum(most, tl.max(logits, 1))
        weights = tl.exp2(logits - more[:, None])
        shrink = tl.exp2(most - more)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.bfloat16), latents, acc * shrink[:, None])
        most = more
    return acc, most, total


@triton.jit
def _share(kv_len, splits, TOKENS: tl.constexpr, LEAST: tl.constexpr):
    """Positions per split, a multiple of the block."""
    return tl.maximum(tl.cdiv(tl.cdiv(kv_len, splits), TOKENS) * TOKENS, LEAST)


@triton.jit
def _decode(
    q, rows, page_table, kv_lens, partial, sizes, heads, scale, q_row, table_row, page_stride, token_stride,
    PAGE_TOKENS: tl.constexpr, RANK: tl.constexpr, KEY: tl.constexpr, WIDE: tl.constexpr, ROTARY: tl.constexpr,
    TILE: tl.constexpr, TOKENS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    sequence, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    splits = tl.num_programs(2)
    head = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mine = head < heads
    kv_len = tl.load(kv_lens + sequence)
    share = _share(kv_len, splits, TOKENS, LEAST)
    first = split * share
    last = tl.minimum(kv_len, first + share)
    if first >= last:
        return
    dim, rotary = tl.arange(0, WIDE)[None, :], tl.arange(0, ROTARY)[None, :]
    at = q + sequence * q_row + head[:, None] * (RANK + KEY)
    tile = tl.load(at + dim, mine[:, None] & (dim < RANK), 0.0)
    keys = tl.load(at + RANK + rotary, mine[:, None] & (rotary < KEY), 0.0)
    acc, most, total = _attend(
        tile, keys, tl.zeros([TILE, WIDE], tl.float32), tl.full([TILE], LOWEST, tl.float32),
        tl.zeros([TILE], tl.float32), rows, page_table + sequence * table_row, first, last,
        tl.full([TILE], 2**31 - 1, tl.int32), scale * LOG2E, page_stride, token_stride,
        True, PAGE_TOKENS, RANK, KEY, TOKENS,
    )  # fmt: skip
    result = (sequence * heads + head) * splits + split
    tl.store(partial + result[:, None] * RANK + dim, acc / total[:, None], mine[:, None] & (dim < RANK))
    tl.store(sizes + result, most + tl.log2(total), mine)


@triton.jit(do_not_specialize=["splits"])  # varies with the batch size
def _combine(
    partial, sizes, kv_lens, out, heads, splits, out_row,
    RANK: tl.constexpr, TOKENS: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr, PART: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of the splits of a row and head. sizes: log2 of their sums of exponentials."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    kv_len = tl.load(kv_lens + row)
    used = tl.cdiv(kv_len, _share(kv_len, splits, TOKENS, LEAST))  # the other splits were not written
    at = (row * heads + head) * splits
    split = tl.arange(0, SPLITS)
    size = tl.load(sizes + at + split, split < used, float("-inf"))
    most = tl.maximum(tl.max(size, 0), LOWEST)
    total = tl.sum(tl.exp2(size - most), 0)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, used, PART):
        part = start + tl.arange(0, PART)
        weight = tl.exp2(tl.load(sizes + at + part, part < used, float("-inf")) - most)
        here = (part < used)[:, None] & (column < RANK)[None, :]
        acc += tl.sum(weight[:, None] * tl.load(partial + (at + part)[:, None] * RANK + column[None, :], here, 0.0), 0)
    acc = acc / tl.where(used == 0, 1.0, total)
    tl.store(out + row * out_row + head * RANK + column, acc.to(tl.bfloat16), column < RANK)


@triton.jit(do_not_specialize=["sequences"])  # varies from step to step
def _prefill(
    q, rows, page_table, q_starts, kv_lens, out, heads, sequences, scale,
    q_row, out_row, table_row, page_stride, token_stride,
    PAGE_TOKENS: tl.constexpr, RANK: tl.constexpr, KEY: tl.constexpr, WIDE: tl.constexpr, ROTARY: tl.constexpr,
    TILE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A tile is TILE // HEADS query rows."""
    ROWS: tl.constexpr = TILE // HEADS
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # longest first: the last rows read most
    sequence, q_start, q_len, first_row = rows_of_tile(index, q_starts, sequences, ROWS, SEQUENCES)
    if first_row >= q_len:
        return
    member = tl.arange(0, TILE)
    row = first_row + member // HEADS
    head = tl.program_id(1) * HEADS + member % HEADS
    live = ((row < q_len) & (member < ROWS * HEADS) & (head < heads))[:, None]
    past = tl.load(kv_lens + sequence) - q_len
    seen = past + tl.minimum(row, q_len - 1)
    end = past + tl.minimum(first_row + ROWS, q_len)
    whole_end = (past + first_row + 1) // TOKENS * TOKENS  # before this position no masking is needed
    dim, rotary = tl.arange(0, WIDE)[None, :], tl.arange(0, ROTARY)[None, :]
    token = (q_start + row).to(tl.int64)
    at = q + token[:, None] * q_row + head[:, None] * (RANK + KEY)
    tile = tl.load(at + dim, live & (dim < RANK), 0.0)
    keys = tl.load(at + RANK + rotary, live & (rotary < KEY), 0.0)
    acc = tl.zeros([TILE, WIDE], tl.float32)
    most, total = tl.full([TILE], LOWEST, tl.float32), tl.zeros([TILE], tl.float32)
    pages = page_table + sequence * table_row
    scale *= LOG2E
    acc, most, total = _attend(
        tile, keys, acc, most, total, rows, pages, 0, whole_end, seen, scale, page_stride, token_stride,
        False, PAGE_TOKENS, RANK, KEY, TOKENS,
    )  # fmt: skip
    acc, most, total = _attend(
        tile, keys, acc, most, total, rows, pages, whole_end, end, seen, scale, page_stride, token_stride,
        True, PAGE_TOKENS, RANK, KEY, TOKENS,
    )  # fmt: skip
    to = out + token[:, None] * out_row + head[:, None] * RANK + dim
    tl.store(to, (acc / total[:, None]).to(tl.bfloat16), live & (dim < RANK))


def splits_for(sequences: int, heads: int, processors: int, shared_bytes: int) -> int:
    """Number of splits per sequence: latent_splits for the tile of this device."""
    return latent_splits(sequences, -(-heads // decode_shape(heads, shared_bytes).tile), processors)


def decode(
    q: Tensor, cache: LatentPages, page_table: Tensor, kv_lens: Tensor, scale: float, splits: int, shared_bytes: int,
    workspace: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Attention of one query row per sequence: row s has position kv_lens[s] - 1. Rows with kv_lens 0 become zeros.

    bfloat16: q [S, heads, rank + R], out [S, heads, rank], contiguous heads; page_table int32 [S, max_pages]; kv_lens
    int32 [S]; workspace float32 [attention_floats(S, heads, rank, splits)] or more. shared_bytes: shared memory per
    thread block of the device.
    """
    _check(q, cache, page_table, kv_lens, out)
    sequences, heads = q.shape[:2]
    if len(kv_lens) != sequences:
        raise ValueError(f"there must be one query row per sequence, not {sequences} for {len(kv_lens)} sequences")
    floats = attention_floats(sequences, heads, cache.rank, splits)
    if workspace.dtype is not torch.float32 or workspace.numel() < floats or not workspace.is_contiguous():
        raise ValueError(f"the workspace must be float32 [{floats}] or more, contiguous")
    if not sequences:
        return
    shape = decode_shape(heads, shared_bytes)
    sizes = workspace.view(-1)[sequences * heads * splits * cache.rank :]
    _decode[(triton.cdiv(heads, shape.tile), sequences, splits)](
        q, cache.rows, page_table, kv_lens, workspace, sizes, heads, scale, q.stride(0), page_table.stride(0),
        *cache.rows.stride()[:2], **_widths(cache), TILE=shape.tile, TOKENS=shape.tokens, LEAST=LEAST_SHARE,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    _combine[(sequences, heads, triton.cdiv(cache.rank, COLUMNS))](
        workspace, sizes, kv_lens, out, heads, splits, out.stride(0), RANK=cache.rank, TOKENS=shape.tokens,
        LEAST=LEAST_SHARE, SPLITS=max(MOST_SPLITS, triton.next_power_of_2(splits)), PART=PART, COLUMNS=COLUMNS,
    )  # fmt: skip


def prefill(
    q: Tensor, cache: LatentPages, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float,
    shared_bytes: int, out: Tensor,
) -> None:  # fmt: skip
    """Attention of q_starts[s + 1] - q_starts[s] query rows of each sequence s, the last at position kv_lens[s] - 1.

    bfloat16: q [T, heads, rank + R], out [T, heads, rank], contiguous heads; page_table int32 [S, max_pages]; q_starts
    int32 [S + 1], starting at 0, non-decreasing; kv_lens int32 [S]. Rows of no sequence are not written.
    """
    _check(q, cache, page_table, kv_lens, out)
    rows, heads = q.shape[:2]
    sequences = len(kv_lens)
    if q_starts.shape != (sequences + 1,) or q_starts.dtype is not torch.int32:
        raise ValueError(f"q_starts must be int32 [{sequences + 1}], not {q_starts.dtype} {tuple(q_starts.shape)}")
    if not rows or not sequences:
        return
    shape = prefill_shape(shared_bytes)
    together = min(heads, shape.tile)
    tiles = rows // (shape.tile // together) + sequences
    _prefill[(tiles, triton.cdiv(heads, together))](  # only the first grid dimension may exceed 65535
        q, cache.rows, page_table, q_starts, kv_lens, out, heads, sequences, scale, q.stride(0), out.stride(0),
        page_table.stride(0), *cache.rows.stride()[:2], **_widths(cache), TILE=shape.tile, HEADS=together,
        TOKENS=shape.tokens, SEQUENCES=max(FEW_SEQUENCES, triton.next_power_of_2(sequences)),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def _check(q: Tensor, cache: LatentPages, page_table: Tensor, kv_lens: Tensor, out: Tensor) -> None:
    (count, heads, width), rank = q.shape, cache.rank
    key = cache.rows.shape[2] - rank
    if width != rank + key or not 0 < rank <= MOST_LATENT_RANK or not 0 < key <= MOST_LATENT_KEY:
        raise ValueError(f"q {tuple(q.shape)} does not fit a cache {tuple(cache.rows.shape)} with latents of {rank}")
    if q.stride()[1:] != (width, 1) or out.shape != (count, heads, rank) or out.stride()[1:] != (rank, 1):
        raise ValueError(f"q {q.stride()} and out {tuple(out.shape)} {out.stride()} must have contiguous heads")
    if cache.rows.stride(2) != 1:
        raise ValueError(f"rows of the cache must be contiguous, but the strides are {cache.rows.stride()}")
    if {page_table.dtype, kv_lens.dtype} != {torch.int32} or len(page_table) != len(kv_lens):
        lengths = f"{len(page_table)} and {len(kv_lens)}"
        raise ValueError(f"page_table and kv_lens must be int32 of one length, not {lengths}")


def _widths(cache: LatentPages) -> dict[str, int]:
    page_tokens, width = cache.rows.shape[1:]
    return {"PAGE_TOKENS": page_tokens, **_constants(cache.rank, width - cache.rank)}


def _constants(rank: int, key: int) -> dict[str, int]:
    wide, rotary = (max(16, triton.next_power_of_2(n)) for n in (rank, key))
    return {"RANK": rank, "KEY": key, "WIDE": wide, "ROTARY": rotary}


def decode_shape(heads: int, shared_bytes: int) -> TileShape:
    """The tile of decode: as many blocks in flight as fit beside the queries; large tiles share a block over more
    heads."""
    if shared_bytes < LARGE_KIB << 10:
        return TileShape(16, 32, 8, 5) if heads <= 16 else TileShape(32, 16, 8, 5)
    if heads <= 32:
        return TileShape(16, 32, 8, 7) if heads <= 16 else TileShape(32, 32, 8, 5)
    return TileShape(LATENT_HEADS, 32, 8, 5 if shared_bytes >= LARGEST_KIB << 10 else 3)


def prefill_shape(shared_bytes: int) -> TileShape:
    if shared_bytes < LARGE_KIB << 10:
        return TileShape(32, 16, 8, 5)
    return TileShape(64, 32, 8, 5 if shared_bytes >= LARGEST_KIB << 10 else 3)


def variants() -> Iterator[Variant]:
    strides = ("q_row", "page_stride", "token_stride")
    types = {"q": "*bf16", "rows": "*bf16", "page_table": "*i32", "kv_lens": "*i32", "scale": "fp32"}
    types |= dict.fromkeys((*strides, "heads", "table_row"), "i32")
    aligned = ("q", "rows", *strides)
    common: dict[str, object] = {"PAGE_TOKENS": 16, **_constants(512, 64)}
    rooms = (LARGEST_KIB, LARGE_KIB, 99)  # descending: a shape must fit the smallest size for which it is chosen
    decodes = {decode_shape(heads, kib << 10): kib for kib in rooms for heads in (16, 32, 128)}
    for shape, kib in decodes.items():
        constants = common | {"TILE": shape.tile, "TOKENS": shape.tokens, "LEAST": LEAST_SHARE}
        outs = {"partial": "*fp32", "sizes": "*fp32"}
        yield Variant(_decode, types | outs, constants, shape.warps, shape.stages, (*aligned, "partial"), 80, kib)
    prefills = {(prefill_shape(kib << 10), heads): kib for kib in rooms for heads in (16, 128)}
    for (shape, heads), kib in prefills.items():
        constants = common | {"TILE": shape.tile, "HEADS": min(heads, shape.tile), "TOKENS": shape.tokens}
        constants |= {"SEQUENCES": FEW_SEQUENCES}
        outs = {"q_starts": "*i32", "out": "*bf16", "sequences": "i32", "out_row": "i32"}
        also = (*aligned, "out", "out_row")
        yield Variant(_prefill, types | outs, constants, shape.warps, shape.stages, also, 80, kib)
    types = dict.fromkeys(("partial", "sizes"), "*fp32") | {"kv_lens": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("heads", "splits", "out_row"), "i32")
    constants = {"RANK": 512, "TOKENS": 32, "LEAST": LEAST_SHARE, "SPLITS": MOST_SPLITS, "PART": PART}
    yield Variant(_combine, types, constants | {"COLUMNS": COLUMNS}, aligned=("partial", "out", "out_row"))
