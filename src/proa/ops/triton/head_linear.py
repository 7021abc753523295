"""A linear layer per head, y[h] = W[h] x[h], for few tokens; further elements of a head's input are copied behind its
output. Never: the meaning of heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from proa.ops.triton.variant import Variant

TILE, DEPTH = 16, 128  # tokens per program, inputs at once
BLOCKS, LEAST_COLUMNS, MOST_COLUMNS = 8, 16, 64  # blocks per head and outputs per block: fill a GPU with few heads


@triton.jit(do_not_specialize=["tokens"])  # varies from step to step
def _head_linear(
    x, weight, y, tokens, x_row, x_head, y_row, y_head, w_head, w_in, w_out,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CARRIED: tl.constexpr, CARRIED_WIDE: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0), tl.program_id(1)
    token = (tl.program_id(2).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
    live = token < tokens
    column, depth = block * COLUMNS + tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEPTH)
    source, target = x + token * x_row + head * x_head, y + token * y_row + head * y_head
    weight += head.to(tl.int64) * w_head
    acc = tl.zeros([TILE, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        at = start + depth
        some = tl.load(source + at[None, :], live & (at < INPUTS)[None, :], 0.0)
        there = (at < INPUTS)[:, None] & (column < OUTPUTS)
        acc = tl.dot(some, tl.load(weight + at[:, None] * w_in + column * w_out, there, 0.0), acc)
    tl.store(target + column, acc.to(tl.bfloat16), live & (column < OUTPUTS))
    if CARRIED > 0:  # noqa: SIM102 - decided when compiling, unlike the next one
        if block == 0:
            behind = tl.arange(0, CARRIED_WIDE)[None, :]
            both = live & (behind < CARRIED)
            tl.store(target + OUTPUTS + behind, tl.load(source + INPUTS + behind, both), both)


def head_linear(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """y[t, h] = x[t, h, :inputs] @ weight[h], followed by the C remaining elements of x[t, h], copied.

    bfloat16: x [T, heads, inputs + C], weight [heads, inputs, outputs] of any strides, y [T, heads, outputs + C]. x and
    y may be strided over heads."""
    (tokens, heads, width), (inputs, outputs) = x.shape, weight.shape[1:]
    carried = width - inputs
    if len(weight) != heads or y.shape != (tokens, heads, outputs + carried) or carried < 0:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and y {tuple(y.shape)} do not fit")
    if x.stride(2) != 1 or y.stride(2) != 1:
        raise ValueError(f"heads of x and y must be contiguous, but the strides are {x.stride()} and {y.stride()}")
    if tokens:
        constants = _constants(inputs, outputs, carried)
        _head_linear[(heads, triton.cdiv(outputs, constants["COLUMNS"]), triton.cdiv(tokens, TILE))](
            x, weight, y, tokens, *x.stride()[:2], *y.stride()[:2], *weight.stride(), **constants,
            num_warps=4, num_stages=3,
        )  # fmt: skip


def _constants(inputs: int, outputs: int, carried: int) -> dict[str, int]:
    wide = triton.next_power_of_2(carried) if carried else 0
    sizes = {"INPUTS": inputs, "OUTPUTS": outputs, "CARRIED": carried, "CARRIED_WIDE": wide}
    columns = min(MOST_COLUMNS, max(LEAST_COLUMNS, triton.next_power_of_2(outputs // BLOCKS)))
    return sizes | {"TILE": TILE, "COLUMNS": columns, "DEPTH": DEPTH}


def variants() -> Iterator[Variant]:
    strides = ("x_row", "x_head", "y_row", "y_head", "w_head", "w_in", "w_out")
    types = dict.fromkeys(("x", "weight", "y"), "*bf16") | dict.fromkeys(("tokens", *strides), "i32")
    for inputs, outputs, carried, one in ((128, 512, 64, "w_out"), (512, 128, 0, "w_in"), (192, 512, 64, "w_out")):
        aligned = ("x", "weight", "y", *(name for name in strides if name != one))
        given = {name: kind for name, kind in types.items() if name != one}
        constants: dict[str, object] = {**_constants(inputs, outputs, carried), one: 1}
        yield Variant(_head_linear, given, constants, 4, 3, aligned, 80)
