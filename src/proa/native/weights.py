"""Handles of packed matrices and experts, and products with them. Arguments are addresses, not arrays: the caller keeps
the memory alive. Never: packing (formats.py), torch.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

from proa.native.formats import Layout
from proa.native.library import Signatures, library
from proa.native.pool import Pool


class Activation(IntEnum):
    """An activation function: PROA_ACTIVATION_* of native.h."""

    SILU = 0
    CLAMPED_SWIGLU = 1  # gpt-oss
    RELU2 = 2  # squared ReLU, without a gate


_SIGNATURES: Signatures = {
    "proa_matrix_create": (
        c_int, c_int64, c_int64, c_int64, c_int64, c_int64,
        POINTER(c_int32), POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64), POINTER(c_void_p),
    ),
    "proa_matrix_destroy": (c_void_p,),
    "proa_experts_create": (c_void_p, c_void_p, c_int, c_float, c_void_p, c_void_p, POINTER(c_void_p)),
    "proa_experts_destroy": (c_void_p,),
    "proa_linear": (
        c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int64, c_int,
    ),
    "proa_moe": (
        c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int64, c_int,
    ),
}  # fmt: skip


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


@dataclass(frozen=True)
class Piece:
    """The part of a stack on one NUMA node: panels from `first_panel` up to the next piece's, of every matrix."""

    first_panel: int
    address: int
    stride: int  # bytes from one matrix of the stack to the next
    nbytes: int


class Matrix:
    """A packed matrix, or a stack of `count` equal ones. Raises ValueError if the pieces do not hold it."""

    def __init__(self, of: Layout, pieces: Sequence[Piece], count: int = 1) -> None:
        self.layout, self.count = of, count
        n = len(pieces)
        self.handle = c_void_p()
        _native().proa_matrix_create(
            of.format, of.rows, of.columns, of.group, count, n,
            (c_int32 * n)(*(p.first_panel for p in pieces)),
            (c_void_p * n)(*(p.address for p in pieces)),
            (c_int64 * n)(*(p.stride for p in pieces)),
            (c_int64 * n)(*(p.nbytes for p in pieces)),
            ctypes.byref(self.handle),
        )  # fmt: skip
        weakref.finalize(self, _native().proa_matrix_destroy, self.handle)


class Experts:
    """The experts of a layer: `gate_up` (panels of gate and up alternate) and `down`.

    Biases are addresses of float32 [experts, padded rows] in the panels' order, or 0.
    """

    def __init__(
        self,
        gate_up: Matrix,
        down: Matrix,
        activation: Activation,
        *,
        limit: float = 0.0,
        gate_bias: int = 0,
        down_bias: int = 0,
    ) -> None:
        self.gate_up, self.down = gate_up, down
        self.handle = c_void_p()
        _native().proa_experts_create(
            gate_up.handle, down.handle, activation, limit, gate_bias or None, down_bias or None,
            ctypes.byref(self.handle),
        )  # fmt: skip
        weakref.finalize(self, _native().proa_experts_destroy, self.handle)


@dataclass(frozen=True)
class Rows:
    """Rows at an address; `stride` in elements. bfloat16, or float32 if `wide` (outputs only)."""

    address: int
    stride: int
    wide: bool = False


def linear(
    pool: Pool, weights: Matrix, x: Rows, y: Rows, tokens: int, *, outputs: int, bias: int = 0, lane: int = 0
) -> None:
    """y [tokens, outputs] = x [tokens, columns] W^T + bias (address of float32, or 0). Raises ValueError."""
    _native().proa_linear(
        pool.handle,
        weights.handle,
        outputs,
        bias or None,
        x.address,
        x.stride,
        y.address,
        y.stride,
        y.wide,
        tokens,
        lane,
    )


def moe(
    pool: Pool, experts: Experts, x: Rows, y: Rows, tokens: int, *, ids: int, weights: int, top_k: int, lane: int = 0
) -> None:
    """y [tokens, rows of down] = weighted sum of each token's experts. ids int32, weights float32 [tokens, top_k].

    top_k 0: all tokens go to the only expert. Raises ValueError, also for an id out of range.
    """
    _native().proa_moe(
        pool.handle, experts.handle, top_k, ids or None, weights or None, x.address, x.stride, y.address, y.stride,
        y.wide, tokens, lane,
    )  # fmt: skip
