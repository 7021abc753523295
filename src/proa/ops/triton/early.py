"""Kernels that are launched before the one before them has ended (programmatic dependent launch, sm_90 and later), so
that their launch and their first steps cost no time. Belongs here: the mechanism and its rule. Never: what kernels do.

The rule. A kernel with the constant EARLY, launched with `options`, calls `begin` in every program, first of all; or
`allow`, then what may come early, then `wait`. Before `wait` it reads nothing but weights, which no kernel writes, and
writes nothing. Tables of addresses are no weights: copies change them between steps. `allow` may come later, where
the next kernel should: what begins holds registers and shared memory, and what it fetches must stay in L2.

Why that is right. `wait` returns when the kernel before it on the stream has ended and its writes are seen. That one
ended after its own `wait`, so the one before it had ended too, and so on: after `wait` everything earlier has ended and
is seen, as if kernels had run one after another. Whatever is launched in the usual way (torch, cuBLAS, copies) waits
for the whole of what is before it, and lets nothing begin before its own end. `allow` lets the next kernel begin once
all programs of this one have begun: one that waits never holds what one before it needs to run. Graphs keep all that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from proa.ops.triton.variant import Variant

LEAST = 90  # compute capability
LINE_VALUES = tl.constexpr(64)  # bfloat16 values of a line of L2
MOST_AHEAD_BYTES = 24 << 20  # half of an H200's L2: more would push out what was fetched first

_FETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def allow(EARLY: tl.constexpr):
    """The next kernel may begin."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """For everything before this kernel."""
    if EARLY:
        gdc_wait()


@triton.jit
def begin(EARLY: tl.constexpr):
    allow(EARLY)
    wait(EARLY)


@triton.jit
def begin_near(EARLY: tl.constexpr):
    """As `begin`, but kernels after this one begin only when the one before it has ended: what they fetch earlier would
    not stay in L2 until they need it."""
    wait(EARLY)
    allow(EARLY)


@triton.jit
def fetch(addresses):
    """Bring the lines of L2 in which these addresses lie. They must be some tensor's."""
    tl.inline_asm_elementwise(_FETCH, "=r,l", [addresses.to(tl.uint64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_rows(rows, K: tl.constexpr):
    """The same of K bfloat16 values from each of `rows` on."""
    LINES: tl.constexpr = (K + LINE_VALUES - 1) // LINE_VALUES
    line = tl.arange(0, triton.next_power_of_2(LINES))
    fetch(rows[:, None] + tl.minimum(line * LINE_VALUES, K - 1)[None, :])


@cache
def possible(device: torch.device) -> bool:
    """Whether kernels can be launched early there. Triton's interpreter, on a CPU, has nothing of the kind."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= divmod(LEAST, 10)


def options(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that keeps the rule above."""
    return {"EARLY": True, "launch_pdl": True} if possible(device) else {"EARLY": False}


def both(variants: Iterable[Variant]) -> Iterator[Variant]:
    """Of kernels that keep the rule: launched early, and not."""
    for one in variants:
        yield replace(one, constants={**one.constants, "EARLY": False})
        yield replace(one, constants={**one.constants, "EARLY": True}, least=max(LEAST, one.least))
