"""Push and pull: kernels with which a graph hands a layer's pairs to the CPU and receives the result.
hybrid/transport.py explains why each side sees the other's writes. Never: the CPU's part.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from proa.native import doorbell
from proa.ops import bell_block
from proa.ops.bell_block import BellBlock, check_pull, check_push
from proa.ops.triton.variant import Variant

_WORDS = (bell_block.JOB_NUMBER, bell_block.PENDING, bell_block.ARRIVED, bell_block.STATE_WORDS)
JOB_NUMBER, _PENDING, _ARRIVED, PAIRS = (tl.constexpr(word) for word in _WORDS)
DECODE_JOB = tl.constexpr(doorbell.DECODE_JOB)
_PROGRAM = tl.constexpr(1 << 24)  # one arrived program in ARRIVED; the lower bits count rows
MOST_PROGRAMS = 64
TILE_ROWS, TILE_VALUES = 8, 16384  # per program of push, if there are several rows
PULL_VALUES = 4096  # elements per program of pull
MOST_POLLED_VALUES = 16384  # above, one program polls in a launch of its own, before the copying programs

# PTX. _RELEASE and _POLL: one thread of the program stores, or polls until the number or a failure is there. _LOOK
# polls until the word is not 0, but at most $2 times.
_RELEASE = tl.constexpr("""{
.reg .pred other;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.ne.u32 other, thread, 0;
@other bra done;
st.release.sys.global.u32 [$1], $2;
done:
mov.u32 $0, 0;
}""")
_POLL = tl.constexpr("""{
.reg .pred leave;
.reg .u32 thread, answered, dead;
.reg .u64 word;
mov.u32 thread, %tid.x;
setp.ne.u32 leave, thread, 0;
@leave bra done;
again:
ld.acquire.sys.global.u64 word, [$1];
mov.b64 {answered, dead}, word;
setp.ne.u32 leave, dead, 0;
@leave bra done;
setp.eq.u32 leave, answered, $2;
@leave bra done;
bra again;
done:
mov.u32 $0, 0;
}""")


_LOOK = tl.constexpr("""{
.reg .pred leave;
.reg .u32 left;
mov.u32 left, $2;
again:
ld.acquire.sys.global.u32 $0, [$1];
setp.ne.u32 leave, $0, 0;
@leave bra done;
sub.u32 left, left, 1;
setp.ne.u32 leave, left, 0;
@leave bra again;
done:
}""")


@triton.jit
def ring(rung, number):
    tl.debug_barrier()  # orders the ring after all writes that this program made or observed
    tl.inline_asm_elementwise(_RELEASE, "=r,l,r", [rung.to(tl.uint64), number], tl.int32, is_pure=False, pack=1)


@triton.jit
def _await(answer, number):
    tl.inline_asm_elementwise(_POLL, "=r,l,r", [answer.to(tl.uint64), number], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _push_rows(
    x, x_row, ids, weights, up_address, to_ids, to_weights, to_x, state, layer, first, tokens,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    row, k = first + tl.arange(0, TILE), tl.arange(0, CHOICES)
    wide, column = row.to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
    there = row < tokens
    inside = there[:, None] & (column < HIDDEN)
    value = tl.load(x + wide * x_row + column, inside)  # in flight while the pairs are counted
    pair = row[:, None] * TOP_K + k[None, :]
    is_pair = there[:, None] & (k < TOP_K)[None, :]
    chosen = tl.load(ids + pair, is_pair, -1).to(tl.int32)
    up = tl.load(up_address + pair, is_pair, 0)
    weight = tl.load(weights + pair, is_pair, 0.0)
    theirs = (chosen >= 0) & (up == 0)
    pairs = tl.sum(theirs.to(tl.int32), 1)
    chosen_any = tl.max(((chosen >= 0) | (up != 0)).to(tl.int32), 1)  # 0: a padding row
    pairs = tl.where(layer >= DECODE_JOB, tl.maximum(pairs, chosen_any), pairs)
    # With several programs, ids of -1 must be written even for rows without a CPU pair: another program may ring.
    written = is_pair & (tl.sum(pairs, 0) > 0) if ALONE else is_pair
    tl.store(to_ids + pair, tl.where(theirs, chosen, -1), written)
    tl.store(to_weights + pair, weight, written)
    tl.store(state + PAIRS + row, pairs, there)
    theirs_too = (pairs > 0)[:, None]
    tl.store(to_x + wide * HIDDEN + column, value, inside & theirs_too)
    for start in range(BLOCK, HIDDEN, BLOCK):
        more = there[:, None] & (start + column < HIDDEN) & theirs_too
        tl.store(to_x + wide * HIDDEN + start + column, tl.load(x + wide * x_row + start + column, more), more)
    return tl.sum((pairs > 0).to(tl.int32), 0)


@triton.jit(do_not_specialize=["layer", "tokens", "rounds"])
def _push(
    x, x_row, ids, weights, up_address, header, to_ids, to_weights, to_x, rung, state, layer, tokens, rounds,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """ALONE: there is one program, and one round."""
    number = tl.load(state + JOB_NUMBER) + 1
    rows = _push_rows(
        x, x_row, ids, weights, up_address, to_ids, to_weights, to_x, state, layer, tl.program_id(0) * TILE, tokens,
        HIDDEN, TOP_K, CHOICES, TILE, BLOCK, ALONE,
    )  # fmt: skip
    if not ALONE:
        for i in range(1, rounds):
            first = (i * tl.num_programs(0) + tl.program_id(0)) * TILE
            rows += _push_rows(
                x, x_row, ids, weights, up_address, to_ids, to_weights, to_x, state, layer, first, tokens,
                HIDDEN, TOP_K, CHOICES, TILE, BLOCK, False,
            )  # fmt: skip
    arrive(header, rung, state, layer, tokens, number, rows, tl.num_programs(0), ALONE)


@triton.jit
def arrive(header, rung, state, layer, tokens, number, rows, programs, ALONE: tl.constexpr):
    """Count a program of `programs` as arrived: it has written its part of a job, with `rows` rows for the CPU. The
    last one to arrive rings with the next job number and updates `state`. ALONE: there is only one program."""
    last = True
    if not ALONE:
        tl.debug_barrier()  # the arrival below publishes the stores of all threads
        before = tl.atomic_add(state + _ARRIVED, rows + _PROGRAM, sem="acq_rel", scope="sys")
        last = before // _PROGRAM == programs - 1
        rows += before % _PROGRAM
    if last:
        tl.debug_barrier()  # all threads have read the counter
        tl.store(state + _ARRIVED, 0)
        tl.store(state + _PENDING, tl.where(rows > 0, 1, 0))
        if rows > 0:
            tl.store(state + JOB_NUMBER, number)
            tl.store(header, layer)
            tl.store(header + 1, tokens)
            tl.store(header + 2, number)
            ring(rung, number)


@triton.jit
def await_answer(answer, state):
    """Wait for the answer to the last job, if there is one."""
    pending, number = tl.load(state + _PENDING), tl.load(state + JOB_NUMBER)
    if pending != 0:
        _await(answer, number)


@triton.jit
def _wait(answer, state):
    await_answer(answer, state)


@triton.jit(do_not_specialize=["polls"])
def _look(word, polls, found):
    seen = tl.inline_asm_elementwise(_LOOK, "=&r,l,r", [word.to(tl.uint64), polls], tl.int32, is_pure=False, pack=1)
    tl.store(found, seen)


@triton.jit
def _pull(
    y, out, out_row, answer, state,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    pairs = tl.load(state + PAIRS + row)
    if WAIT:
        await_answer(answer, state)
    # volatile: the CPU has written these values since the last pull, so a cached copy would be stale
    value = tl.load(y + row * HIDDEN + column, inside & (pairs > 0), 0.0, volatile=True)
    tl.store(out + row * out_row + column, value, inside)


def push(
    x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int, block: BellBlock, state: Tensor
) -> None:
    """See Push of ops/device_table.py. In a DECODE_JOB, rows without a pair of the CPU are handed over too: see awaited
    of ops/bell_block.py."""
    tokens, top_k = ids.shape
    check_push(x, ids, weights, up_address, block)
    shape = _push_shape(tokens, x.shape[1], top_k)
    tiles = triton.cdiv(tokens, shape["TILE"])
    programs = min(tiles, MOST_PROGRAMS)
    _push[(programs,)](
        x, x.stride(0), ids, weights, up_address, block.header, block.ids, block.weights, block.x, block.rung, state,
        layer, tokens, triton.cdiv(tiles, programs), **shape, num_warps=_push_warps(shape),
    )  # fmt: skip


def pull(out: Tensor, block: BellBlock, state: Tensor) -> None:
    """See Pull of ops/device_table.py. After a failure on the CPU it returns at once."""
    check_pull(out, block)
    polled = out.numel() <= MOST_POLLED_VALUES
    if not polled:
        _wait[(1,)](block.answer, state, num_warps=1)
    _take(out, block, state, polled)


def take(out: Tensor, block: BellBlock, state: Tensor) -> None:
    """`pull` for an answer that has already arrived: does not wait."""
    check_pull(out, block)
    _take(out, block, state, False)


def poll(word: Tensor, polls: int, found: Tensor) -> None:
    """See Poll of ops/device_table.py."""
    _look[(1,)](word, polls, found, num_warps=1)


def _take(out: Tensor, block: BellBlock, state: Tensor, polled: bool) -> None:
    tokens, hidden = out.shape
    columns, warps = _pull_shape(hidden)
    _pull[(tokens, triton.cdiv(hidden, columns))](
        block.y, out, out.stride(0), block.answer, state, HIDDEN=hidden, BLOCK=columns, WAIT=polled,
        num_warps=warps,
    )  # fmt: skip


def _push_shape(tokens: int, hidden: int, top_k: int) -> dict[str, int]:
    """Tile constants of push. A few rows go to one program, which needs no arrival counter."""
    tile = 1 if tokens == 1 else TILE_ROWS
    return {
        "HIDDEN": hidden,
        "TOP_K": top_k,
        "CHOICES": triton.next_power_of_2(top_k),
        "TILE": tile,
        "BLOCK": min(triton.next_power_of_2(hidden), TILE_VALUES // tile),
        "ALONE": tokens <= tile,
    }


def _push_warps(shape: dict[str, int]) -> int:
    return min(16, max(1, shape["TILE"] * shape["BLOCK"] // 256))  # each thread has at least 16 bytes


def _pull_shape(hidden: int) -> tuple[int, int]:
    """Columns and warps of a program of pull."""
    columns = min(triton.next_power_of_2(hidden), PULL_VALUES)
    return columns, min(16, max(1, columns // 128))


def variants() -> Iterator[Variant]:
    inputs = {"x": "*bf16", "weights": "*fp32", "up_address": "*i64"}
    to = {"header": "*i32", "to_ids": "*i32", "to_weights": "*fp32", "to_x": "*bf16", "rung": "*i32", "state": "*i32"}
    numbers = dict.fromkeys(("x_row", "layer", "tokens", "rounds"), "i32")
    aligned = ("x", "ids", "weights", "up_address", "to_ids", "to_weights", "to_x", "x_row")
    for ids in ("*i32", "*i64"):
        for tokens, hidden, top_k in ((1, 2048, 8), (4, 7168, 8), (32, 2048, 10), (4096, 2880, 4)):
            shape = _push_shape(tokens, hidden, top_k)
            types = inputs | {"ids": ids} | to | numbers
            yield Variant(_push, types, shape, warps=_push_warps(shape), aligned=aligned)
    yield Variant(_look, {"word": "*i32", "polls": "i32", "found": "*i32"}, {}, warps=1)
    yield Variant(_wait, {"answer": "*i64", "state": "*i32"}, {}, warps=1)
    types = {"y": "*fp32", "out": "*fp32", "out_row": "i32", "answer": "*i64", "state": "*i32"}
    for hidden, polled in ((2048, True), (2048, False), (7168, True)):
        columns, warps = _pull_shape(hidden)
        constants = {"HIDDEN": hidden, "BLOCK": columns, "WAIT": polled}
        yield Variant(_pull, types, constants, warps=warps, aligned=("y", "out", "out_row"))
