"""RMSNorm (arXiv 1910.07467), also fused with the residual add before it. One program per row, or per group of a
row."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from proa.ops.table import Norm
from proa.ops.triton.variant import Variant

MOST_COLUMNS = 16384


@triton.jit
def _norm(
    x, y, weight, out, x_row, x_group, y_row, out_row, out_group, width, eps, offset,
    BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(weight + column, inside, 0.0).to(tl.float32) + offset
    at = x + row * x_row + group * x_group + column
    value = tl.load(at, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + row * y_row + column, inside, 0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)  # normalise the rounded residual stream
        tl.store(at, value, inside)
        value = value.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row * out_row + group * out_group + column, (normed * scale).to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, norm: Norm, out: Tensor) -> None:
    """out = x / rms(x) * (offset + weight), in float32, over the last dimension of bfloat16 x [T, N] or [T, groups, N].

    norm.weight bfloat16 [N]; out like x. Rows and groups may be strided, columns not; N up to 16384.
    """
    _check(x, norm.weight, out)
    groups = x.shape[1] if x.dim() == 3 else 1
    x_group, out_group = (x.stride(1), out.stride(1)) if x.dim() == 3 else (0, 0)
    _launch((len(x), groups), x, None, norm, out, (x_group, out_group))


def add_rms_norm(x: Tensor, y: Tensor, norm: Norm, out: Tensor) -> None:
    """x += y in place, rounded to bfloat16, then out = rms_norm(x).

    x, out bfloat16 [T, N]; y bfloat16 or float32 [T, N]; norm.weight bfloat16 [N].
    """
    _check(x, norm.weight, out)
    if x.dim() != 2 or y.shape != x.shape or y.stride(-1) != 1:
        raise ValueError(f"x and y must be [T, N] of one shape, not {tuple(x.shape)} and {tuple(y.shape)}")
    _launch((len(x), 1), x, y, norm, out, (0, 0))


def _check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if x.dim() not in (2, 3) or out.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"shapes differ: x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)}")
    if x.shape[-1] > MOST_COLUMNS:
        raise ValueError(f"x must have at most {MOST_COLUMNS} columns, not {x.shape[-1]}")
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError("the columns of x and out must be contiguous")


def _launch(
    grid: tuple[int, int], x: Tensor, y: Tensor | None, norm: Norm, out: Tensor, group_strides: tuple[int, int]
) -> None:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    y_row = 0 if y is None else y.stride(0)
    strides = (x.stride(0), group_strides[0], y_row, out.stride(0), group_strides[1])
    if grid[0]:
        _norm[grid](
            x, y, norm.weight, out, *strides, width, norm.eps, norm.offset, BLOCK=block, ADD=y is not None, 
            num_warps=_warps(block),
        )  # fmt: skip


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def variants() -> Iterator[Variant]:
    strides = dict.fromkeys(("x_row", "x_group", "y_row", "out_row", "out_group", "width"), "i32")
    tensors = dict.fromkeys(("x", "weight", "out"), "*bf16")
    for y in (None, "*bf16", "*fp32"):
        for block in (128, 2048, MOST_COLUMNS):
            constants = {"BLOCK": block, "ADD": y is not None, **({} if y else {"y": None})}
            types = tensors | strides | {"eps": "fp32", "offset": "fp32"} | ({"y": y} if y else {})
            yield Variant(_norm, types, constants, warps=_warps(block), aligned=("x", "weight", "out"))
