"""Formats of packed weights and the layout of their panels. Belongs here: constants shared with csrc/src/layout.h.
Never: checkpoints.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from proa.native.library import Signatures, library

PANEL_ROWS = 16  # csrc/src/layout.h


class Format(IntEnum):
    """A packed format: type of the quantised values and of their scales; values as in csrc/src/layout.h."""

    BF16 = 0
    FP16 = 1
    FP8_ROW = 2  # e4m3, float32 scale per row and group
    FP8_PANEL = 3  # e4m3, one float32 scale per panel (16 rows) and group: blocks of 128 x 128, whole tensors
    MXFP8 = 4  # e4m3, e8m0 scale per row and 32 columns
    INT8_F32 = 5
    INT8_F16 = 6  # GGUF's Q8_0
    INT4_F32 = 7  # (q - 8) * s
    INT4_F16 = 8  # GGUF's Q4_0
    INT4_BF16 = 9
    UINT4_F32 = 10  # q * s + m
    UINT4_F16 = 11  # GGUF's Q4_1
    UINT4_BF16 = 12
    NVFP4 = 13  # e2m1, e4m3 scale per row and 16 columns, float32 factor
    MXFP4 = 14  # e2m1, e8m0 scale per row and 32 columns
    Q4_K = 15
    Q6_K = 16
    Q5_K = 17


class Stored(IntEnum):
    """Stored types whose scales, if any, are inside their blocks; values as in ggml. See csrc/src/stored.h."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    F64 = 28
    BF16 = 30
    MXFP4 = 39


class Code(IntEnum):
    """Types of quantised values with separate scale tensors, and of those scales; values as in csrc/src/stored.h."""

    E4M3 = 1000
    E8M0 = 1001
    INT8 = 1002  # two's complement
    UINT8 = 1003  # code - 128
    INT4 = 1004  # code - 8; two codes per byte, the first in the low bits
    UINT4 = 1005
    E2M1 = 1006
    SIGNED4 = 1007  # two's complement, otherwise as INT4


CODES_PER_BYTE = {
    Code.E4M3: 1, Code.INT8: 1, Code.UINT8: 1, Code.INT4: 2, Code.UINT4: 2, Code.E2M1: 2, Code.SIGNED4: 2,
}  # fmt: skip


class Order(IntEnum):
    """Storage order of a matrix; values as in csrc/src/coded.h."""

    ROWS = 0
    TRANSPOSED = 1  # stored rows are the matrix's columns; unquantised types only
    WORDS = 2  # GPTQ: [columns, rows] transposed; a 32-bit word packs consecutive columns of one row
    AWQ = 3  # [columns, rows] transposed; a 32-bit word packs eight rows of one column, in AWQ's order


class Form(NamedTuple):
    """Packed format of a matrix. group: columns that share a scale; 0: all."""

    format: Format
    group: int


BF16_FORM = Form(Format.BF16, 0)

# E4M3 with a scale per block of 128, tensor or channel: the forms that a GPU can multiply with E4M3 activations.
E4M3_FORMS = (Form(Format.FP8_PANEL, 128), Form(Format.FP8_PANEL, 0), Form(Format.FP8_ROW, 0))


@dataclass(frozen=True)
class Kept:
    """The packed format that holds a checkpoint's type without rounding. block_columns must divide the columns."""

    format: Format
    group: int
    block_columns: int


# GGUF type -> packed format; MXFP4 is in QUANTISED. A type without a format of its own is widened, losslessly.
KEPT = {
    "Q4_0": Kept(Format.INT4_F16, 32, 32),
    "Q4_1": Kept(Format.UINT4_F16, 32, 32),
    "Q5_0": Kept(Format.INT8_F16, 32, 32),
    "Q8_0": Kept(Format.INT8_F16, 32, 32),
    "Q2_K": Kept(Format.UINT4_F32, 16, 256),
    "Q3_K": Kept(Format.INT4_F32, 16, 256),
    "Q4_K": Kept(Format.Q4_K, 32, 256),
    "Q5_K": Kept(Format.Q5_K, 32, 256),
    "Q6_K": Kept(Format.Q6_K, 16, 256),
    "IQ4_NL": Kept(Format.INT8_F16, 32, 32),
    "IQ4_XS": Kept(Format.INT8_F32, 32, 256),
}


GROUPS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512, 1024)  # supported numbers of columns per scale


def _quantised() -> dict[str, Kept]:
    """Type name -> packed format. A name has the quantised type, the columns per scale, for INT4 also the scales'
    type."""
    found = {
        "FP8 tensor": Kept(Format.FP8_PANEL, 0, 1),
        "FP8 channel": Kept(Format.FP8_ROW, 0, 1),
        "MXFP8": Kept(Format.MXFP8, 32, 1),
        "NVFP4": Kept(Format.NVFP4, 16, 2),
        "MXFP4": Kept(Format.MXFP4, 32, 2),
    }
    for group, of in [(0, "channel"), *((n, str(n)) for n in GROUPS)]:
        found[f"INT8 {of}"] = Kept(Format.INT8_F32, group, 1)
        found[f"INT4 {of} F32"] = Kept(Format.INT4_F32, group, 2)
        found[f"INT4 {of} F16"] = Kept(Format.INT4_F16, group, 2)
        found[f"INT4 {of} BF16"] = Kept(Format.INT4_BF16, group, 2)
        found[f"UINT4 {of}"] = Kept(Format.UINT4_F32, group, 2)
        if group:
            found[f"FP8 block {of}"] = Kept(Format.FP8_PANEL, group, 1)
    return found


# Types of quantised matrices whose scales are separate tensors; weights/quantised.py makes the names.
QUANTISED = _quantised()

# Types of random weights, which are made in their packed format; no checkpoint has these names.
DUMMY = {
    "dummy fp8": Kept(Format.FP8_PANEL, 128, 1),
    "dummy int4": Kept(Format.INT4_BF16, 32, 1),
    "dummy nvfp4": Kept(Format.NVFP4, 16, 1),
    "dummy mxfp4": Kept(Format.MXFP4, 32, 1),
}

_ALL_KEPT = KEPT | QUANTISED | DUMMY


def kept_form(stored: Collection[str], columns: int) -> Form:
    """The packed form of a stack of matrices stored with the types `stored`: lossless if all have one type that a
    packed format holds, else bfloat16."""
    kept = _ALL_KEPT.get(next(iter(stored))) if len(stored) == 1 else None
    return Form(kept.format, kept.group) if kept and columns % kept.block_columns == 0 else BF16_FORM


class _LayoutInfo(ctypes.Structure):
    _fields_ = [
        ("panels", c_int32), ("padded", c_int32), ("group", c_int32),
        ("code_bytes", c_int64), ("scale_bytes", c_int64), ("panel_bytes", c_int64),
    ]  # fmt: skip


class PackSource(ctypes.Structure):
    """Rows of weights to pack, as pointers and strides in bytes: proa_source in csrc/include/proa/native.h."""

    _fields_ = [
        ("codes", c_void_p), ("code_stride", c_int64), ("scales", c_void_p), ("scale_stride", c_int64),
        ("scale_rows", c_int64), ("mins", c_void_p), ("block_scales", c_void_p), ("block_mins", c_void_p),
        ("block_stride", c_int64), ("factor", c_float),
    ]  # fmt: skip


_SIGNATURES: Signatures = {
    "proa_layout": (c_int, c_int64, c_int64, c_int64, POINTER(_LayoutInfo)),
    "proa_pack": (c_int, c_int64, c_int64, c_int64, POINTER(PackSource), c_int, c_void_p, c_int64),
}


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


@dataclass(frozen=True)
class Layout:
    """The packed layout of a matrix [rows, columns]. A panel is 16 rows; group: columns that share a scale, 0: all."""

    format: Format
    rows: int
    columns: int
    group: int
    panels: int
    padded_columns: int
    panel_bytes: int

    @property
    def matrix_bytes(self) -> int:
        return self.panels * self.panel_bytes


@functools.cache  # called for each of thousands of experts
def layout(of: Format, rows: int, columns: int, group: int = 0) -> Layout:
    """Compute a matrix's layout. Raises ValueError if the format lacks such groups, or the matrix is empty or too
    large."""
    info = _LayoutInfo()
    _native().proa_layout(of, rows, columns, group, ctypes.byref(info))
    return Layout(of, rows, columns, group, info.panels, info.padded, info.panel_bytes)


def pack(to: Layout, source: PackSource, rows: int, step: int, address: int, nbytes: int) -> None:
    """Pack the first `rows` rows of `source` into panels at `address`, `step` panels apart.

    Raises ValueError for missing scales, codes that the format cannot hold, or too few bytes.
    """
    _native().proa_pack(to.format, rows, to.columns, to.group, ctypes.byref(source), step, address, nbytes)
