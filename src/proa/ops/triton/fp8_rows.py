"""Dynamic quantisation of activations to e4m3, as FP8 checkpoints with dynamic activations define it: per token, with
one scale per 128 columns, or one for the row. Lossy. Belongs here: rounding, and buffers for rounded rows. Never:
products.

The scale is max|x| / 448, so that no value saturates. A row with NaN or infinity becomes NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import E4M3_FORMS, Form, Layout
from proa.ops.sizes import E4M3_CAPABILITY
from proa.ops.sizes import E4M3_COLUMNS as COLUMNS
from proa.ops.triton.kv_codes import to_e4m3
from proa.ops.triton.variant import Variant

_SPAN, _WARPS = 1024, 4
LEAST: tl.constexpr = tl.constexpr(2.0**-100)  # lower bound of max|x|, so that 448 / max|x| is finite


def suits(of: Layout) -> bool:
    """True if weights of this layout can be multiplied with e4m3 activations."""
    return Form(of.format, of.group) in E4M3_FORMS


@dataclass(frozen=True)
class Fp8Rows:
    """Rounded rows. codes: float8_e4m3fn [T, padded columns]; in each group of four columns the second and third are
    swapped, as in a panel's words. scales: float32 [T, groups]: x is approximately codes * scale.
    """

    codes: Tensor
    scales: Tensor

    def first(self, rows: int) -> Fp8Rows:
        return Fp8Rows(self.codes[:rows], self.scales[:rows])


def fp8_rows(rows: int, of: Layout, device: torch.device) -> Fp8Rows:
    """Allocate room for `rows` rows, to be multiplied with weights of layout `of`. Raises ValueError unless `of`
    suits."""
    if not suits(of):
        raise ValueError(f"weights in {of.format.name}, group {of.group}, cannot be multiplied with e4m3 activations")
    groups = -(-of.columns // COLUMNS)
    codes = torch.empty(rows, groups * COLUMNS, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(codes, torch.empty(rows, groups if of.group else 1, device=device))


@triton.jit
def _columns_of(x, start, COLUMNS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr):
    """Load columns as float32 [groups, words, 4]."""
    column = start + tl.arange(0, SPAN)
    value = tl.load(x + column, column < COLUMNS, 0.0).to(tl.float32)
    return tl.reshape(value, [SPAN // GROUP, GROUP // 4, 4])


@triton.jit
def _scale_of(most):
    """The scale to store, and the multiplier of the values."""
    most = tl.maximum(most, LEAST)
    largest = tl.full(most.shape, 448.0, tl.float32)
    return tl.div_rn(most, largest), tl.div_rn(largest, most)


@triton.jit
def _store_words(codes, start, value, inverse, PADDED: tl.constexpr):
    """Store codes in words of four; bytes of a word are columns 0, 2, 1, 3."""
    place = tl.arange(0, 4)
    shift = ((place % 2) * 16 + (place // 2) * 8)[None, None, :]
    word = tl.sum(to_e4m3(value * inverse).to(tl.int32) << shift, 2)
    at = start // 4 + tl.arange(0, word.numel)
    tl.store(codes + at, tl.reshape(word, [word.numel]), at < PADDED // 4)


@triton.jit
def _round_rows(
    x, codes, scales, x_row,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    codes += row * (PADDED // 4)
    if GROUPS == 1:
        most = tl.zeros([1, SPAN // 4, 4], tl.float32)
        for start in range(0, PADDED, SPAN):
            most = tl.maximum(most, tl.abs(_columns_of(x, start, COLUMNS, SPAN, SPAN)))
        scale, inverse = _scale_of(tl.max(tl.max(most, 2, keep_dims=True), 1, keep_dims=True))
        tl.store(scales + row + tl.arange(0, 1), tl.reshape(scale, [1]))
        for start in range(0, PADDED, SPAN):
            _store_words(codes, start, _columns_of(x, start, COLUMNS, SPAN, SPAN), inverse, PADDED)
    else:
        start = tl.program_id(1) * SPAN
        value = _columns_of(x, start, COLUMNS, SPAN, GROUP)
        scale, inverse = _scale_of(tl.max(tl.max(tl.abs(value), 2, keep_dims=True), 1, keep_dims=True))
        group = start // GROUP + tl.arange(0, SPAN // GROUP)
        tl.store(scales + row * GROUPS + group, tl.reshape(scale, [SPAN // GROUP]), group < GROUPS)
        _store_words(codes, start, value, inverse, PADDED)


def round_rows(x: Tensor, to: Fp8Rows) -> None:
    """Quantise x bfloat16 [T, columns], rows may be strided, columns not, into `to`, which has T rows.

    code = e4m3(x * (448 / size)), scale = size / 448 in float32, where size = max|x| in the group, at least 2^-100.
    Raises ValueError for other shapes and dtypes.
    """
    rows, columns = x.shape
    padded, groups = to.codes.shape[1], to.scales.shape[1]
    whole = -(-columns // COLUMNS)
    if x.dtype != torch.bfloat16 or x.stride(1) != 1:
        raise ValueError(f"x must be bfloat16 with contiguous rows, not {x.dtype} of strides {x.stride()}")
    if to.codes.shape != (rows, whole * COLUMNS) or len(to.scales) != rows or groups not in (1, whole):
        raise ValueError(
            f"x {tuple(x.shape)} does not fit codes {tuple(to.codes.shape)}, scales {tuple(to.scales.shape)}"
        )
    if not (to.codes.is_contiguous() and to.scales.is_contiguous()):
        raise ValueError("codes and scales must be contiguous")
    if rows:
        parts = 1 if groups == 1 else triton.cdiv(padded, _SPAN)
        _round_rows[(rows, parts)](
            x, to.codes.view(torch.int32), to.scales, x.stride(0), **_constants(columns, groups), num_warps=_WARPS
        )


def _constants(columns: int, groups: int) -> dict[str, object]:
    padded = -(-columns // COLUMNS) * COLUMNS
    return {"COLUMNS": columns, "PADDED": padded, "GROUPS": groups, "SPAN": _SPAN, "GROUP": COLUMNS}


def variants() -> Iterator[Variant]:
    types = {"x": "*bf16", "codes": "*i32", "scales": "*fp32", "x_row": "i32"}
    for columns, groups in ((2048, 1), (2048, 16), (2880, 23)):
        aligned = ("x", "codes", "scales", "x_row")
        yield Variant(_round_rows, types, _constants(columns, groups), _WARPS, aligned=aligned, least=E4M3_CAPABILITY)
