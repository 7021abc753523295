"""The activation of a gated MLP, in one pass over gate and up. Never: products; experts fuse the activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.weights import Activation
from proa.ops.triton.panels import activated
from proa.ops.triton.variant import Variant

_COLUMNS, _WARPS = 1024, 4


@triton.jit
def _gated(
    gate_up, out, gate_up_row, out_row, width,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = gate_up + row * gate_up_row + column
    gate, up = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + width, inside, 0.0).to(tl.float32)
    y = activated(gate, up, ACTIVATION, LIMIT)
    tl.store(out + row * out_row + column, y.to(out.dtype.element_ty), inside)


def gated(gate_up: Tensor, out: Tensor, activation: Activation = Activation.SILU, limit: float = 0.0) -> None:
    """out [T, width] = activation(gate, up) of gate_up [T, 2 width], gate first; float32 in between, rounded once.

    Both bfloat16, rows may be strided, columns not. Raises ValueError for other shapes, strides and dtypes.
    """
    rows, width = out.shape
    if gate_up.shape != (rows, 2 * width) or gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"gate and up must be [{rows}, {2 * width}] with contiguous rows, not {tuple(gate_up.shape)}")
    if gate_up.dtype != torch.bfloat16 or out.dtype != torch.bfloat16:
        raise ValueError(f"gate, up and out must be bfloat16, not {gate_up.dtype} and {out.dtype}")
    if rows:
        _gated[(rows, triton.cdiv(width, _COLUMNS))](
            gate_up, out, gate_up.stride(0), out.stride(0), width, ACTIVATION=int(activation), LIMIT=limit,
            COLUMNS=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    types = {"gate_up": "*bf16", "out": "*bf16"} | dict.fromkeys(("gate_up_row", "out_row", "width"), "i32")
    aligned = ("gate_up", "out", "gate_up_row", "out_row", "width")
    for activation, limit in ((Activation.SILU, 0.0), (Activation.CLAMPED_SWIGLU, 7.0)):
        constants: dict[str, object] = {"ACTIVATION": int(activation), "LIMIT": limit, "COLUMNS": _COLUMNS}
        yield Variant(_gated, types, constants, warps=_WARPS, aligned=aligned)
