"""The gated delta rule by chunks of rows: a chunk's updates solve a triangular system (UT transform, arXiv 2406.06484,
2412.06464), so that a chunk takes a few matrix products instead of 64 steps; docs/decisions/033 derives it. Belongs
here: the convolution for chunked steps, the per-chunk matrices, the state's recurrence over chunks. Never: the norm,
which sequences are chunked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import RecurrentState
from proa.ops.sizes import DELTA_CHUNK as CHUNK
from proa.ops.sizes import FEW_SEQUENCES, delta_chunk_floats
from proa.ops.table import DeltaInputs, DeltaWeights, DeviceBatch
from proa.ops.triton.attention import rows_of_tile
from proa.ops.triton.delta_rows import keep_tail, log_decay, pair, part_of
from proa.ops.triton.variant import Variant

CONVOLVED, WARPS = 16, 4  # rows per program of the convolution, and its warps
BLOCK = 16  # diagonal blocks of a chunk's triangle up to this size are inverted in parallel
MOST_KEY = 128  # largest key_dim
OLDEST = 80  # oldest compute capability: needs bfloat16 matrix products
# Shared memory per thread block that the two tiles need: one chunk with 16 columns of a state (60 KiB; with the next
# chunk prefetched, 92 with Triton 3.6 and 108 with 3.7), and two chunks with 32 columns: on an H200 the 4 x 32 programs
# of a sequence are then one per SM.
LEAST_KIB, LARGE_KIB = 99, 225


@dataclass(frozen=True)
class ChunkTile:
    """Columns of the state per program, and how it is compiled."""

    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Chunks:
    """Resources for chunked sequences: the tile for the device, and a workspace float32 [delta_chunk_floats(T, heads)]
    or more."""

    shape: ChunkTile
    workspace: Tensor


@triton.jit(do_not_specialize=["sequences"])  # varies from step to step
def _convolve(
    q, k, v, conv, tail, q_starts, kv_lens, states, mixed, sequences, groups, channels, row_stride, group_stride,
    FEW: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MEMBERS: tl.constexpr, TAPS: tl.constexpr,
    TAPS_PADDED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """The causal convolution. Values become float32, and so do queries and keys of sequences of up to FEW rows; those
    of longer sequences become pairs of bfloat16 (see `pair`) in the same bytes, higher parts first."""
    tile, part = tl.program_id(0), tl.program_id(1)
    sequence, q_start, q_len, first = rows_of_tile(tile, q_starts, sequences, ROWS, SEQUENCES)
    if first >= q_len:
        return
    past = tl.load(kv_lens + sequence) > q_len
    kept = tail + tl.load(states + sequence).to(tl.int64) * (TAPS - 1) * channels
    source, channel, width = part_of(q, k, v, part, groups, group_stride, KEY, VALUE, MEMBERS)
    index, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    row = (q_start + index).to(tl.int64)
    inside = (index < q_len) & (column < width)
    # A column's taps are neighbours: read one by one, they would take most of the kernel's time (679 us instead of 283
    # for 8192 rows of Qwen3-Next on an H200).
    each, of_tap = tl.arange(0, WIDE)[:, None], tl.arange(0, TAPS_PADDED)[None, :]
    taps = tl.load(conv + (channel + each) * TAPS + of_tap, (each < width) & (of_tap < TAPS), 0.0)
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        x = tl.load(source + (row - back) * row_stride + column, inside & (index >= back), 0.0).to(tl.float32)
        if first == 0:  # rows before the step's first one
            before = kept + (index + tap) * channels + channel + column
            x += tl.load(before, inside & past & (index < back), 0.0).to(tl.float32)
        total += x * tl.sum(tl.where(of_tap == tap, taps, 0.0), 1)[None, :]
    y = total / (1.0 + tl.exp(-total))
    if part < 2 * groups:
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
    if part < groups:
        y /= tl.sqrt(KEY * 1.0)
    to = row * channels + channel
    if (part < 2 * groups) & (q_len > FEW):
        high, low = pair(y)
        pairs = mixed.to(tl.pointer_type(tl.bfloat16)) + 2 * to + column
        tl.store(pairs, high, inside)
        tl.store(pairs + KEY, low, inside)
    else:
        tl.store(mixed + to + column, y, inside)


@triton.jit
def _times(a_high, a_low, b_high, b_low):
    """Product of two matrices of bfloat16 pairs, omitting lower times lower: error up to 3 * 2 ** -18 of |a| |b|."""
    return tl.dot(a_high, b_high, tl.dot(a_low, b_high, tl.dot(a_high, b_low)))


@triton.jit
def _doubled(inverse, lower, i, j, SIZE: tl.constexpr):
    """Given the inverses of the diagonal blocks of size SIZE of 1 + lower (0 elsewhere), compute those of blocks twice
    as large: [[P, 0], [L, R]] has the inverse [[1/P, 0], [-1/R L 1/P, 1/R]]."""
    between = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    high, low = pair(inverse)
    l_high, l_low = pair(tl.where(between, lower, 0.0))
    step_high, step_low = pair(_times(l_high, l_low, high, low))
    return inverse - _times(high, low, step_high, step_low)


@triton.jit
def _inverted(lower, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of 1 + lower, where lower [ROWS, ROWS] is strictly lower triangular."""
    BLOCKS: tl.constexpr = ROWS // BLOCK
    of, to, inside = tl.arange(0, BLOCKS), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    diagonal = (of[:, None] == to[None, :])[:, None, :, None]  # [blocks, 1, blocks, 1]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(lower, [BLOCKS, BLOCK, BLOCKS, BLOCK]), 0.0), 2)
    i, j = inside[None, :, None], inside[None, None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -blocks, 0.0))  # inverses of blocks of size 2
    inverse = _doubled(inverse, blocks, i, j, 2)
    inverse = _doubled(inverse, blocks, i, j, 4)
    inverse = _doubled(inverse, blocks, i, j, 8)
    whole = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), [ROWS, ROWS])
    row = tl.arange(0, ROWS)
    whole = _doubled(whole, lower, row[:, None], row[None, :], BLOCK)
    return _doubled(whole, lower, row[:, None], row[None, :], 2 * BLOCK)


@triton.jit
def _split_log(log):
    """Split a decay's logarithm into a multiple of 2 ** -10, of which 64 add up exactly, and the rest: differences of
    large cumulative sums then lose no precision. Below -104 the decay is 0 in float32 anyway."""
    log = tl.where(log < -104.0, -104.0, log)
    coarse = tl.floor(log * 1024.0) / 1024.0
    return coarse, log - coarse


@triton.jit
def _load_pairs(high, offsets, mask, APART: tl.constexpr):
    """Load bfloat16 pairs whose lower parts lie APART elements behind the higher ones."""
    return tl.load(high + offsets, mask, 0.0), tl.load(high + APART + offsets, mask, 0.0)


@triton.jit(do_not_specialize=["sequences"])  # varies from step to step
def _prepare(
    mixed, b, a, a_log, dt_bias, q_starts, inverses, scores, passed, left, sequences, groups, channels,
    gates_row, gates_group,
    FEW: tl.constexpr, KEY: tl.constexpr, MEMBERS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Compute for one chunk and head, per row i: row i of the inverse, columns scaled by beta, and the scores of q_i
    with all k_j, both as bfloat16 pairs; the decay from the chunk's start to i, and from i to the chunk's end."""
    tile, head = tl.program_id(0), tl.program_id(1)
    group, member = head // MEMBERS, head % MEMBERS
    _, q_start, q_len, first = rows_of_tile(tile, q_starts, sequences, ROWS, SEQUENCES)
    if (q_len <= FEW) | (first >= q_len):
        return
    i, key = tl.arange(0, ROWS), tl.arange(0, WIDE)[None, :]
    live = first + i < q_len
    row = (q_start + first + i).to(tl.int64)
    gate = row * gates_row + group * gates_group + member
    log = log_decay(tl.load(a + gate, live, 0.0).to(tl.float32), tl.load(dt_bias + head), tl.load(a_log + head))
    coarse, fine = _split_log(tl.where(live, log, 0.0))
    coarse, fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    place = row * groups * MEMBERS + head
    tl.store(passed + place, tl.exp(coarse + fine), live)
    end = i == ROWS - 1
    rest = tl.sum(tl.where(end, coarse, 0.0), 0) - coarse + (tl.sum(tl.where(end, fine, 0.0), 0) - fine)
    tl.store(left + place, tl.exp(rest), live)
    before = i[:, None] >= i[None, :]
    since = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    decay = tl.where(before, tl.exp(tl.where(before, since, 0.0)), 0.0)
    some = live[:, None] & (key < KEY)
    mixed_pairs = mixed.to(tl.pointer_type(tl.bfloat16))
    of_query = 2 * (row[:, None] * channels + group * KEY) + key
    k_high, k_low = _load_pairs(mixed_pairs, of_query + 2 * groups * KEY, some, KEY)
    q_high, q_low = _load_pairs(mixed_pairs, of_query, some, KEY)
    square = place[:, None] * (2 * ROWS) + i[None, :]
    high, low = pair(_times(q_high, q_low, tl.trans(k_high), tl.trans(k_low)) * decay)
    tl.store(scores + square, high, live[:, None])
    tl.store(scores + square + ROWS, low, live[:, None])
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-tl.load(b + gate, live, 0.0).to(tl.float32))), 0.0)
    alike = _times(k_high, k_low, tl.trans(k_high), tl.trans(k_low))
    lower = tl.where(i[:, None] > i[None, :], beta[:, None] * decay * alike, 0.0)
    high, low = pair(_inverted(lower, ROWS, BLOCK) * beta[None, :])
    tl.store(inverses + square, high, live[:, None])
    tl.store(inverses + square + ROWS, low, live[:, None])


@triton.jit
def _carry(
    q, k, v, mixed, inverses, scores, passed, left, rule, tail, q_starts, kv_lens, states, seen,
    groups, channels, row_stride, group_stride,
    FEW: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MEMBERS: tl.constexpr, TAPS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update some columns of a head's state over all chunks of a sequence."""
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, member, heads = head // MEMBERS, head % MEMBERS, groups * MEMBERS
    q_start = tl.load(q_starts + sequence)
    q_len = tl.load(q_starts + sequence + 1) - q_start
    if q_len <= FEW:
        return
    past = tl.load(kv_lens + sequence) > q_len
    slot = tl.load(states + sequence).to(tl.int64)
    i, key, column = tl.arange(0, ROWS), tl.arange(0, WIDE), block * COLUMNS + tl.arange(0, COLUMNS)
    some_keys, some_columns = key < KEY, column < VALUE
    kept = rule + ((slot * heads + head) * KEY + key[:, None]) * VALUE + column[None, :]
    some = some_keys[:, None] & some_columns[None, :]
    state = tl.load(kept, some & past, 0.0)
    pairs = mixed.to(tl.pointer_type(tl.bfloat16)) + 2 * group * KEY
    of_rows, of_values = 2 * channels * i[:, None] + key[None, :], channels * i[:, None] + column[None, :]
    of_squares = 2 * ROWS * heads * i[:, None] + i[None, :]
    for first in range(0, q_len, ROWS):
        start = (q_start + first).to(tl.int64)
        live, place = first + i < q_len, start * heads + head
        live_keys, live_values = live[:, None] & some_keys[None, :], live[:, None] & some_columns[None, :]
        k_high, k_low = _load_pairs(pairs + 2 * (start * channels + groups * KEY), of_rows, live_keys, KEY)
        values = mixed + start * channels + 2 * groups * KEY + head * VALUE
        value = tl.load(values + of_values, live_values, 0.0)
        high, low = _load_pairs(inverses + 2 * ROWS * place, of_squares, live[:, None], ROWS)
        since = tl.load(passed + place + heads * i, live, 0.0)[:, None]
        s_high, s_low = pair(state)
        x_high, x_low = pair(value - since * _times(k_high, k_low, s_high, s_low))
        update = _times(high, low, x_high, x_low)
        u_high, u_low = pair(update * tl.load(left + place + heads * i, live, 0.0)[:, None])
        last = tl.minimum(ROWS, q_len - first) - 1
        state = state * tl.load(passed + place + heads * last)
        state += _times(tl.trans(k_high), tl.trans(k_low), u_high, u_low)
        q_high, q_low = _load_pairs(pairs + 2 * start * channels, of_rows, live_keys, KEY)
        high, low = _load_pairs(scores + 2 * ROWS * place, of_squares, live[:, None], ROWS)
        u_high, u_low = pair(update)
        found = since * _times(q_high, q_low, s_high, s_low) + _times(high, low, u_high, u_low)
        tl.store(seen + place * VALUE + heads * VALUE * i[:, None] + column[None, :], found, live_values)
    tl.store(kept, state, some)
    end = (q_start + q_len - 1).to(tl.int64) * row_stride + group * group_stride
    tail += slot * (TAPS - 1) * channels
    of_head = 2 * groups * KEY + head * VALUE
    keep_tail(v + end + member * VALUE, tail + of_head, q_len, past, channels, row_stride, column, some_columns, TAPS)
    if (member == 0) & (block == 0):
        keep_tail(q + end, tail + group * KEY, q_len, past, channels, row_stride, key, some_keys, TAPS)
        keep_tail(k + end, tail + (groups + group) * KEY, q_len, past, channels, row_stride, key, some_keys, TAPS)


def shape_for(capability: int, shared_bytes: int) -> ChunkTile | None:
    """The tile for a device of this compute capability (90: 9.0) and shared memory per thread block; None: chunks are
    not possible."""
    if capability < OLDEST or shared_bytes < LEAST_KIB << 10:
        return None
    return ChunkTile(32, 4, 2) if shared_bytes >= LARGE_KIB << 10 else ChunkTile(16, 8, 1)


def convolve(
    x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, at: DeviceBatch, few_rows: int, mixed: Tensor
) -> None:
    """The causal convolution of all sequences' rows, chunked or not.

    mixed float32 [T, channels]: for sequences of more than few_rows rows, queries and keys are stored as bfloat16
    pairs.
    """
    (rows, groups, key_dim), (members, value_dim) = x.q.shape, x.v.shape[2:]
    sequences = len(at.kv_lens)
    _convolve[(rows // CONVOLVED + sequences, groups * (2 + members))](
        x.q, x.k, x.v, weights.conv, state.tail, at.q_starts, at.kv_lens, at.states, mixed, sequences, groups,
        mixed.shape[1], x.q.stride(0), x.q.stride(1), FEW=few_rows, KEY=key_dim, VALUE=value_dim, MEMBERS=members,
        TAPS=weights.conv.shape[2], TAPS_PADDED=triton.next_power_of_2(weights.conv.shape[2]),
        WIDE=triton.next_power_of_2(max(key_dim, value_dim)), ROWS=CONVOLVED,
        SEQUENCES=max(FEW_SEQUENCES, triton.next_power_of_2(sequences)), num_warps=WARPS,
    )  # fmt: skip


def by_chunks(
    x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, at: DeviceBatch, few_rows: int,
    mixed: Tensor, chunks: Chunks, seen: Tensor,
) -> None:  # fmt: skip
    """The delta rule over the sequences of more than few_rows rows (at least taps - 1); rows of other sequences are not
    touched.

    mixed float32 [T, channels]: output of `convolve`; seen float32 [T, G * R, value dim]: output. Writes states and
    tails.
    """
    (rows, groups, key_dim), (members, value_dim) = x.q.shape, x.v.shape[2:]
    heads, sequences, channels = groups * members, len(at.kv_lens), mixed.shape[1]
    floats, taps = delta_chunk_floats(rows, heads), weights.conv.shape[2]
    if chunks.workspace.dtype is not torch.float32 or chunks.workspace.numel() < floats:
        raise ValueError(f"the chunks' workspace must be float32 [{floats}] or more")
    if key_dim > MOST_KEY or few_rows < taps - 1:
        raise ValueError(
            f"chunks need key_dim <= {MOST_KEY} and few_rows >= {taps - 1}, but they are {key_dim} and {few_rows}"
        )
    space, squares = chunks.workspace.view(-1), 2 * CHUNK * rows * heads
    inverses, scores = space[:squares].view(torch.bfloat16).chunk(2)
    passed, left = space[squares:floats].chunk(2)
    constants = {"FEW": few_rows, "KEY": key_dim, "MEMBERS": members, "ROWS": CHUNK}
    constants["WIDE"] = max(16, triton.next_power_of_2(key_dim))
    _prepare[(rows // CHUNK + sequences, heads)](
        mixed, x.b, x.a, weights.a_log, weights.dt_bias, at.q_starts, inverses, scores, passed, left, sequences, groups,
        channels, x.b.stride(0), x.b.stride(1), **constants, BLOCK=BLOCK,
        SEQUENCES=max(FEW_SEQUENCES, triton.next_power_of_2(sequences)), num_warps=4,
    )  # fmt: skip
    shape = chunks.shape
    _carry[(sequences, heads, triton.cdiv(value_dim, shape.columns))](
        x.q, x.k, x.v, mixed, inverses, scores, passed, left, state.rule, state.tail, at.q_starts, at.kv_lens,
        at.states, seen, groups, channels, x.q.stride(0), x.q.stride(1), **constants, VALUE=value_dim, TAPS=taps,
        COLUMNS=shape.columns, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    floats = ("mixed", "passed", "left", "seen", "rule")
    shared = dict.fromkeys(floats[:3], "*fp32") | dict.fromkeys(("inverses", "scores"), "*bf16")
    shared |= {"q_starts": "*i32"} | dict.fromkeys(("groups", "channels"), "i32")
    first = shared | dict.fromkeys(("b", "a"), "*bf16") | dict.fromkeys(("a_log", "dt_bias"), "*fp32")
    first |= dict.fromkeys(("sequences", "gates_row", "gates_group"), "i32")
    then = shared | dict.fromkeys(("q", "k", "v", "tail"), "*bf16") | dict.fromkeys(("rule", "seen"), "*fp32")
    then |= dict.fromkeys(("kv_lens", "states"), "*i32") | dict.fromkeys(("row_stride", "group_stride"), "i32")
    aligned = ("q", "k", "v", "tail", "inverses", "scores", "channels", "row_stride", "group_stride", *floats)
    taps = dict.fromkeys(("q", "k", "v", "tail"), "*bf16") | dict.fromkeys(("q_starts", "kv_lens", "states"), "*i32")
    taps |= {"conv": "*fp32", "mixed": "*fp32"}
    taps |= dict.fromkeys(("sequences", "groups", "channels", "row_stride", "group_stride"), "i32")
    of_taps, of_first, of_then = (tuple(name for name in aligned if name in types) for types in (taps, first, then))
    for key, value, members in ((128, 128, 2), (48, 80, 1)):
        both: dict[str, object] = {"FEW": 32, "KEY": key, "MEMBERS": members, "WIDE": triton.next_power_of_2(key)}
        both |= {"ROWS": CHUNK}
        constants = both | {"BLOCK": BLOCK, "SEQUENCES": FEW_SEQUENCES}
        wide: dict[str, object] = {"FEW": 32, "KEY": key, "VALUE": value, "MEMBERS": members, "TAPS": 4}
        wide |= {"TAPS_PADDED": 4, "ROWS": CONVOLVED, "SEQUENCES": FEW_SEQUENCES}
        wide |= {"WIDE": triton.next_power_of_2(max(key, value))}
        yield Variant(_convolve, taps, wide, WARPS, aligned=of_taps)
        yield Variant(_prepare, first, constants, aligned=of_first, least=OLDEST)
        for kib in (LEAST_KIB, LARGE_KIB):
            shape = shape_for(OLDEST, kib << 10)
            assert shape is not None
            constants = both | {"VALUE": value, "TAPS": 4, "COLUMNS": shape.columns}
            yield Variant(_carry, then, constants, shape.warps, shape.stages, of_then, OLDEST, kib)
