"""Linear attention by the gated delta rule (arXiv 2412.06464; ops/table.py, GatedDelta): the causal convolution, a
program per row and head; the recurrence, a program per sequence, head and some columns of its state, token by token;
the gated norm. Belongs here: decode and prefill, and which sequences are computed by chunks (delta_chunks.py). Never:
where states are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import RecurrentState
from proa.ops.sizes import FEW_SEQUENCES
from proa.ops.table import DeltaInputs, DeltaWeights, DeviceBatch
from proa.ops.triton import delta_chunks
from proa.ops.triton.delta_chunks import Chunks, by_chunks, convolve
from proa.ops.triton.delta_rows import keep_tail, log_decay, part_of
from proa.ops.triton.variant import Variant

# Columns of a state that one warp keeps in its registers: fewer for few sequences, so that all SMs have warps. Decode
# of 1, 4, 8, 32 sequences on an H200 takes 10.5, 13.0, 20.6, 69.3 us a layer with 16 columns, 11.8, 15.0, 18.9, 56.0
# with 32.
COLUMNS = (16, 32)
FEW_STATES = 4
# Sequences of up to this many rows are computed token by token: on an H200 chunks are as fast from 20 rows on with one
# sequence, from 48 with four (decision 033).
FEW_ROWS = 32
ALL_ROWS = 2**31 - 1
NORM_ROWS = 8  # rows per program of the norm, if there are many rows


@triton.jit(do_not_specialize=["sequences"])  # varies from step to step
def _convolve(
    q, k, v, conv, tail, q_starts, kv_lens, states, mixed, sequences, groups, channels, row_stride, group_stride,
    KEY: tl.constexpr, VALUE: tl.constexpr, MEMBERS: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    s = tl.arange(0, SEQUENCES)
    begun = (s < sequences) & (tl.load(q_starts + s, s < sequences, 0) <= row)
    sequence = tl.sum(begun.to(tl.int32), 0) - 1
    q_start = tl.load(q_starts + sequence)
    q_len = tl.load(q_starts + sequence + 1) - q_start
    index = row - q_start
    if index >= q_len:
        return
    past = tl.load(kv_lens + sequence) > q_len
    kept = tail + tl.load(states + sequence).to(tl.int64) * (TAPS - 1) * channels
    source, channel, width = part_of(q, k, v, part, groups, group_stride, KEY, VALUE, MEMBERS)
    source += row.to(tl.int64) * row_stride
    column = tl.arange(0, WIDE)
    inside = column < width
    total = tl.zeros([WIDE], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        here = index >= back
        x = tl.load(source - back * row_stride + column, inside & here, 0.0).to(tl.float32)
        before = kept + (index + tap) * channels + channel + column
        x += tl.load(before, inside & past & (index < back), 0.0).to(tl.float32)
        total += x * tl.load(conv + (channel + column) * TAPS + tap, inside, 0.0)
    y = total / (1.0 + tl.exp(-total))
    if part < 2 * groups:
        y *= tl.rsqrt(tl.sum(y * y, 0) + 1e-6)
    if part < groups:
        y /= tl.sqrt(KEY * 1.0)
    tl.store(mixed + row.to(tl.int64) * channels + channel + column, y, inside)


@triton.jit
def _rule(
    q, k, v, b, a, a_log, dt_bias, mixed, rule, tail, q_starts, kv_lens, states, seen,
    groups, channels, row_stride, group_stride, gates_row, gates_group,
    FEW: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MEMBERS: tl.constexpr, TAPS: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, member = head // MEMBERS, head % MEMBERS
    q_start = tl.load(q_starts + sequence)
    q_len = tl.load(q_starts + sequence + 1) - q_start
    if (q_len == 0) | (q_len > FEW):
        return
    past = tl.load(kv_lens + sequence) > q_len
    slot = tl.load(states + sequence).to(tl.int64)
    key, column = tl.arange(0, WIDE), block * COLUMNS + tl.arange(0, COLUMNS)
    some_keys, some_columns = key < KEY, column < VALUE
    place = rule + ((slot * groups * MEMBERS + head) * KEY + key[:, None]) * VALUE + column[None, :]
    some = some_keys[:, None] & some_columns[None, :]
    state = tl.load(place, some & past, 0.0)
    rate, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    first = q_start.to(tl.int64)
    gate = first * gates_row + group * gates_group + member
    at = mixed + first * channels
    of_query, of_key = at + group * KEY + key, at + (groups + group) * KEY + key
    of_value = at + 2 * groups * KEY + head * VALUE + column
    out = seen + (first * groups * MEMBERS + head) * VALUE + column
    next_query, next_key = tl.load(of_query, some_keys, 0.0), tl.load(of_key, some_keys, 0.0)
    next_value, next_a, next_b = tl.load(of_value, some_columns, 0.0), tl.load(a + gate), tl.load(b + gate)
    for i in range(q_len):
        query, this, value = next_query, next_key, next_value
        decay = tl.exp(log_decay(next_a.to(tl.float32), bias, rate))
        beta = 1.0 / (1.0 + tl.exp(-next_b.to(tl.float32)))
        more = i + 1 < q_len  # the next token's inputs load while this one is computed
        of_query += channels
        of_key += channels
        of_value += channels
        gate += gates_row
        next_query, next_key = tl.load(of_query, some_keys & more, 0.0), tl.load(of_key, some_keys & more, 0.0)
        next_value = tl.load(of_value, some_columns & more, 0.0)
        next_a, next_b = tl.load(a + gate, more, 0.0), tl.load(b + gate, more, 0.0)
        state *= decay
        known = tl.sum(state * this[:, None], 0)
        state += this[:, None] * (beta * (value - known))[None, :]
        tl.store(out, tl.sum(state * query[:, None], 0), some_columns)
        out += groups * MEMBERS * VALUE
    tl.store(place, state, some)
    kept, last = tail + slot * (TAPS - 1) * channels, (first + q_len - 1) * row_stride + group * group_stride
    of_head = 2 * groups * KEY + head * VALUE
    keep_tail(v + last + member * VALUE, kept + of_head, q_len, past, channels, row_stride, column, some_columns, TAPS)
    if (member == 0) & (block == 0):
        keep_tail(q + last, kept + group * KEY, q_len, past, channels, row_stride, key, some_keys, TAPS)
        keep_tail(k + last, kept + (groups + group) * KEY, q_len, past, channels, row_stride, key, some_keys, TAPS)


@triton.jit(do_not_specialize=["rows"])  # varies from step to step
def _norm(
    seen, z, weight, slots, out, rows, heads, row_stride, group_stride, out_row, eps,
    VALUE: tl.constexpr, MEMBERS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.program_id(1)
    column = tl.arange(0, WIDE)[None, :]
    inside = (row < rows) & (column < VALUE)
    live = inside & (tl.load(slots + row, row < rows, -1) >= 0)
    x = tl.load(seen + (row * heads + head) * VALUE + column, live, 0.0)
    at = z + row * row_stride + head // MEMBERS * group_stride + head % MEMBERS * VALUE
    gate = tl.load(at + column, live, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / VALUE + eps)
    x *= scale[:, None] * tl.load(weight + column, column < VALUE, 0.0).to(tl.float32)
    y = x * gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * out_row + head * VALUE + column, y.to(tl.bfloat16), inside)


def takes_chunks(rows: int, key_dim: int, *, one_each: bool) -> bool:
    """True if a step of `rows` rows may contain a sequence that is computed by chunks."""
    return not one_each and rows > FEW_ROWS and key_dim <= delta_chunks.MOST_KEY


@dataclass(frozen=True)
class DeltaSpace:
    """Buffers of a call, float32: mixed [T, channels], seen [T, G * R, value dim]; chunks: for sequences of more than
    FEW_ROWS rows, None: all are computed token by token."""

    mixed: Tensor
    seen: Tensor
    chunks: Chunks | None = None


def gated_delta(
    x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, at: DeviceBatch, slots: Tensor, space: DeltaSpace,
    out: Tensor, least_rows: int = 1,
) -> None:  # fmt: skip
    """The gated delta rule over T rows, bfloat16 (ops/table.py, GatedDelta). Rows of slot -1, which belong to no
    sequence, become zeros.

    out bfloat16 [T, G * R * value dim]; state.tail bfloat16. least_rows: see CudaOps.
    """
    (rows, groups, key_dim), (members, value_dim) = x.q.shape, x.v.shape[2:]
    heads, channels = groups * members, weights.conv.shape[0]
    mixed, seen, chunks = space.mixed, space.seen, space.chunks
    _check(x, weights, state, mixed, seen, out)
    if not rows:
        return
    sequences, strides = len(at.kv_lens), (x.q.stride(0), x.q.stride(1))
    key, value = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    constants = {"KEY": key_dim, "VALUE": value_dim, "MEMBERS": members, "TAPS": weights.conv.shape[2]}
    if chunks:
        convolve(x, weights, state, at, FEW_ROWS, mixed)
    else:
        _convolve[(rows, 2 * groups + heads)](
            x.q, x.k, x.v, weights.conv, state.tail, at.q_starts, at.kv_lens, at.states, mixed, sequences, groups,
            channels, *strides, **constants, WIDE=max(key, value),
            SEQUENCES=max(FEW_SEQUENCES, triton.next_power_of_2(sequences)), num_warps=1,
        )  # fmt: skip
    columns = COLUMNS[max(sequences, least_rows) > FEW_STATES]
    _rule[(sequences, heads, triton.cdiv(value_dim, columns))](
        x.q, x.k, x.v, x.b, x.a, weights.a_log, weights.dt_bias, mixed, state.rule, state.tail, at.q_starts, at.kv_lens,
        at.states, seen, groups, channels, *strides, x.b.stride(0), x.b.stride(1), **constants,
        FEW=FEW_ROWS if chunks else ALL_ROWS, WIDE=key, COLUMNS=columns, num_warps=1,
    )  # fmt: skip
    if chunks:
        by_chunks(x, weights, state, at, FEW_ROWS, mixed, chunks, seen)
    together, warps = (NORM_ROWS, 4) if chunks else (1, 1)
    _norm[(triton.cdiv(rows, together), heads)](
        seen, x.z, weights.norm, slots, out, rows, heads, *strides, out.stride(0), weights.eps, VALUE=value_dim,
        MEMBERS=members, WIDE=value, ROWS=together, num_warps=warps,
    )  # fmt: skip


def _check(
    x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, mixed: Tensor, seen: Tensor, out: Tensor
) -> None:
    (rows, groups, key_dim), (members, value_dim) = x.q.shape, x.v.shape[2:]
    heads = groups * members
    channels, _, taps = weights.conv.shape
    if channels != 2 * groups * key_dim + heads * value_dim or x.k.shape != x.q.shape or x.z.shape != x.v.shape:
        raise ValueError(f"q {tuple(x.q.shape)}, k and v {tuple(x.v.shape)} must have {channels} channels together")
    if len({_strides(t)[:2] for t in (x.q, x.k, x.v, x.z)}) > 1 or _strides(x.b)[:2] != _strides(x.a)[:2]:
        raise ValueError("q, k, v and z must have the same strides over rows and groups, and so must b and a")
    inner = (_strides(x.q)[2], *_strides(x.v)[2:], _strides(x.b)[2])
    if inner != (1, value_dim if members > 1 else 0, 1, 1 if members > 1 else 0) or x.b.shape[1:] != (groups, members):
        raise ValueError("the inner dimensions of q, k, v, z, b and a must be contiguous")
    for name, tensor, shape in (
        ("rule of a slot", state.rule[0], (heads, key_dim, value_dim)),
        ("tail of a slot", state.tail[0], (taps - 1, channels)), ("mixed", mixed, (rows, channels)),
        ("seen", seen, (rows, heads, value_dim)), ("conv", weights.conv, (channels, 1, taps)),
    ):  # fmt: skip
        if tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {shape}, not {tuple(tensor.shape)} {tensor.stride()}")
    if out.shape != (rows, heads * value_dim) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {heads * value_dim}], not {tuple(out.shape)}")


def _strides(t: Tensor) -> tuple[int, ...]:
    """Strides, with 0 for dimensions of size 1."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True))


def variants() -> Iterator[Variant]:
    inputs = dict.fromkeys(("q", "k", "v", "tail"), "*bf16") | dict.fromkeys(("q_starts", "kv_lens", "states"), "*i32")
    inputs |= {"mixed": "*fp32"} | dict.fromkeys(("groups", "channels", "row_stride", "group_stride"), "i32")
    tensors = ("q", "k", "v", "z", "conv", "tail", "mixed", "seen", "rule", "out")
    aligned = (*tensors, "row_stride", "group_stride", "channels", "out_row")

    def of(types: dict[str, str]) -> tuple[str, ...]:
        return tuple(name for name in aligned if name in types)

    for key, value, members in ((128, 128, 2), (48, 80, 1)):
        constants: dict[str, object] = {"KEY": key, "VALUE": value, "MEMBERS": members, "TAPS": 4}
        wide, tall = triton.next_power_of_2(max(key, value)), triton.next_power_of_2(key)
        types = inputs | {"conv": "*fp32", "sequences": "i32"}
        yield Variant(_convolve, types, constants | {"WIDE": wide, "SEQUENCES": FEW_SEQUENCES}, 1, aligned=of(types))
        types = (
            inputs | dict.fromkeys(("b", "a"), "*bf16") | dict.fromkeys(("a_log", "dt_bias", "rule", "seen"), "*fp32")
        )
        types |= dict.fromkeys(("gates_row", "gates_group"), "i32")
        for few, columns in product((FEW_ROWS, ALL_ROWS), COLUMNS):
            one_by_one = constants | {"FEW": few, "WIDE": tall, "COLUMNS": columns}
            yield Variant(_rule, types, one_by_one, 1, aligned=of(types))
        types = {"seen": "*fp32", "slots": "*i64"} | dict.fromkeys(("z", "weight", "out"), "*bf16") | {"eps": "fp32"}
        types |= dict.fromkeys(("rows", "heads", "row_stride", "group_stride", "out_row"), "i32")
        last: dict[str, object] = {"VALUE": value, "MEMBERS": members, "WIDE": triton.next_power_of_2(value)}
        for rows, warps in ((1, 1), (NORM_ROWS, 4)):
            yield Variant(_norm, types, last | {"ROWS": rows}, warps, aligned=of(types))
