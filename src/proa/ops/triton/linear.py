"""Linear layers for a few rows, bound by reading the weights once. Belongs here: T <= LINEAR_ROWS. Never: more rows,
for which cuBLAS is as fast, or packed weights.

One row: a program sums some rows of the weights on the CUDA cores. More: the tensor cores multiply tiles of 16 rows,
and the warps of a program share the columns, so that even a program of 8 outputs keeps eight warps loading. Both
prefetch into shared memory: a program has 12-48 KiB in flight, and an SM holds several (HBM needs about 32 KiB per SM).
Sums run in a fixed order, so that results are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.sizes import LINEAR_ROWS
from proa.ops.triton.variant import Variant


@triton.jit
def _one(
    x, weight, bias, out, weight_row, outputs,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < outputs
    column = tl.arange(0, COLUMNS)
    at = weight + tl.minimum(row, outputs - 1).to(tl.int64)[:, None] * weight_row + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, K, COLUMNS, num_stages=STAGES):
        if K % COLUMNS == 0:
            value = tl.load(x + first + column)
            part = tl.load(at + first)
        else:
            left = column < K - first
            value = tl.load(x + first + column, left, 0.0)
            part = tl.load(at + first, left[None, :], 0.0)
        total += part.to(tl.float32) * value.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + row, inside, 0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def _few(
    x, weight, bias, out, x_row, weight_row, out_row, tokens, outputs,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, 16)
    column = tl.arange(0, SLICES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x_at = x + token.to(tl.int64)[None, :, None] * x_row + column[:, None, :]
    at = weight + tl.minimum(row, outputs - 1).to(tl.int64)[None, :, None] * weight_row + column[:, None, :]
    exists = (token < tokens)[None, :, None]
    total = tl.zeros([SLICES, 16, ROWS], tl.float32)
    for first in tl.range(0, K, SLICES * COLUMNS, num_stages=STAGES):
        if K % (SLICES * COLUMNS) == 0:
            value = tl.load(x_at + first, exists, 0.0)
            part = tl.load(at + first)
        else:
            left = (column < K - first)[:, None, :]
            value = tl.load(x_at + first, exists & left, 0.0)
            part = tl.load(at + first, left, 0.0)
        total = tl.dot(value, tl.permute(part, (0, 2, 1)), total)
    y = tl.sum(total, 0)
    if bias is not None:
        y += tl.load(bias + row, row < outputs, 0.0).to(tl.float32)[None, :]
    inside = (token < tokens)[:, None] & (row < outputs)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * out_row + row[None, :], y.to(out.dtype.element_ty), inside)


@dataclass(frozen=True)
class _Block:
    """A program's block: `rows` of the weights, `columns` at a time in each of `slices`; each warp has a slice."""

    rows: int
    columns: int
    slices: int = 1
    warps: int = 4
    stages: int = 4


def _block(tokens: int, outputs: int, inputs: int) -> _Block:
    """The block for a shape: few rows per program if there are few programs. Weights in flight per SM, calculated for
    132 SMs:

    1 row: 155 KiB for 5120 x 2048, 93 for 2048 x 4096, 144 for 151936 x 2048; a router of 128 has one program with one
    load per SM. More rows: 58, 46 and 144 KiB; a router is read by 16 programs.
    """
    if tokens == 1:
        rows = 16 if outputs >= 32768 else 4 if outputs >= 1024 else 1
        most = 2048 if 4096 <= outputs < 32768 else 4096 // rows  # columns
        return _Block(rows, min(most, 2048, triton.next_power_of_2(inputs)))
    if outputs >= 16384:
        return _Block(32, 64, slices=2)  # more rows share each load of x, which comes from L2
    if outputs >= 4096:
        return _Block(16, 64, slices=4)
    return _Block(16 if outputs >= 1024 else 8, 64, slices=8, warps=8)  # at most one program per SM


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, least_rows: int = 1) -> None:
    """out = x @ weight^T + bias with float32 sums. T up to LINEAR_ROWS, the number of rows of `x`. With fewer than
    least_rows, a row has the bits that it would have among so many.

    x bfloat16 [T, K], weight bfloat16 [N, K], bias float32 or bfloat16 [N], out bfloat16 or float32 [T, N]. Rows may be
    strided, columns not. Raises ValueError for other shapes, strides and dtypes.
    """
    _check(x, weight, bias, out)
    tokens, inputs = x.shape
    outputs = len(weight)
    if not tokens:
        return
    kernel_rows = max(tokens, least_rows)
    block = _block(kernel_rows, outputs, inputs)
    grid = (triton.cdiv(outputs, block.rows),)
    sizes = {"K": inputs, "ROWS": block.rows, "COLUMNS": block.columns, "STAGES": block.stages}
    if kernel_rows == 1:
        _one[grid](x, weight, bias, out, weight.stride(0), outputs, **sizes, num_warps=block.warps)
    else:
        strides = (x.stride(0), weight.stride(0), out.stride(0))
        _few[grid](
            x, weight, bias, out, *strides, tokens, outputs, **sizes, SLICES=block.slices, num_warps=block.warps
        )  # fmt: skip


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    tokens, inputs = x.shape
    if tokens > LINEAR_ROWS:
        raise ValueError(f"x must have at most {LINEAR_ROWS} rows, not {tokens}")
    if weight.shape[1:] != (inputs,) or out.shape != (tokens, len(weight)):
        raise ValueError(f"shapes differ: x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.stride(0) != 1):
        raise ValueError(f"the bias must be {len(weight)} contiguous values, not {tuple(bias.shape)}")
    if x.stride(1) != 1 or weight.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the columns of x, weight and out must be contiguous")
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ValueError(f"x and weight must be bfloat16, not {x.dtype} and {weight.dtype}")


def variants() -> Iterator[Variant]:
    integers = dict.fromkeys(("x_row", "weight_row", "out_row", "tokens", "outputs"), "i32")
    aligned = ("x", "weight", "out", "x_row", "weight_row")
    cases = [
        (1, 5120, 2048), (1, 2048, 4096), (1, 151936, 2048), (1, 128, 2048), (1, 2048, 2880),
        (16, 2048, 4096), (16, 5120, 2048), (16, 151936, 2048), (16, 128, 2048), (16, 2048, 2880),
    ]  # fmt: skip
    for (tokens, outputs, inputs), bias, out in [
        (c, b, o) for c in cases for b, o in ((None, "*bf16"), ("*fp32", "*fp32"))
    ]:
        block, kernel = _block(tokens, outputs, inputs), _one if tokens == 1 else _few
        types = {"x": "*bf16", "weight": "*bf16", "out": out} | integers | ({"bias": bias} if bias else {})
        constants: dict[str, object] = {
            "K": inputs,
            "ROWS": block.rows,
            "COLUMNS": block.columns,
            "STAGES": block.stages,
        }
        constants |= {"SLICES": block.slices} | ({} if bias else {"bias": None})
        names = kernel.arg_names
        yield Variant(
            kernel,
            {n: t for n, t in types.items() if n in names},
            {n: c for n, c in constants.items() if n in names},
            warps=block.warps,
            aligned=tuple(n for n in aligned if n in names),
        )
