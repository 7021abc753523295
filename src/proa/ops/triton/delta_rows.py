"""Device functions shared by both forms of the gated delta rule, token by token and by chunks. Never: a launcher."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair(x):
    """Split float32 x into two bfloat16 whose sum is x, up to a relative error of 2 ** -18."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def log_decay(a, dt_bias, a_log):
    """-exp(a_log) softplus(a + dt_bias)."""
    x = a + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    step = tl.where(x > 20.0, x, tl.where(e < 1e-3, e * (1.0 - 0.5 * e), tl.log(1.0 + e)))
    return -tl.exp(a_log) * step


@triton.jit
def keep_tail(source, tail, q_len, past, channels, row_stride, column, inside, TAPS: tl.constexpr):
    """Store the last rows of a sequence's inputs (the last one is at `source`) as its tail. Each column is read and
    written by one thread, oldest row first."""
    for j in tl.static_range(TAPS - 1):
        back = TAPS - 2 - j
        x = tl.load(source - back * row_stride + column, inside & (back < q_len), 0.0)
        x += tl.load(tail + (j + q_len) * channels + column, inside & past & (back >= q_len), 0.0)
        tl.store(tail + j * channels + column, x, inside)


@triton.jit
def part_of(q, k, v, part, groups, group_stride, KEY: tl.constexpr, VALUE: tl.constexpr, MEMBERS: tl.constexpr):
    """Locate a part, a head of q, k or v: its address in a row, first channel and width."""
    if part < groups:
        source = q + part * group_stride
        channel = part * KEY
        width = KEY
    elif part < 2 * groups:
        source = k + (part - groups) * group_stride
        channel = part * KEY
        width = KEY
    else:
        head = part - 2 * groups
        source = v + head // MEMBERS * group_stride + head % MEMBERS * VALUE
        channel = 2 * groups * KEY + head * VALUE
        width = VALUE
    return source, channel, width
