"""Formats of packed weights, stored types, and the layout of panels. Belongs here: what the tables of csrc say about
them (csrc/src/formats.h, stored.cc). Never: checkpoints.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from proa.errors import NativeError
from proa.native.library import REBUILD, Signatures, library
from proa.native.tables import read_table

PANEL_ROWS = 16  # csrc/src/layout.h


class Format(IntEnum):
    """A packed format, by its name in the table of csrc/src/formats.h, which `facts` reads."""

    BF16 = 0
    FP16 = 1
    FP8_ROW = 2
    FP8_PANEL = 3
    MXFP8 = 4
    INT8_F32 = 5
    INT8_F16 = 6
    INT4_F32 = 7
    INT4_F16 = 8
    INT4_BF16 = 9
    UINT4_F32 = 10
    UINT4_F16 = 11
    UINT4_BF16 = 12
    NVFP4 = 13
    MXFP4 = 14
    Q4_K = 15
    Q6_K = 16
    Q5_K = 17


ANY_GROUP = -1


class FormatFacts(NamedTuple):
    """A row of the table of formats: proa_format_info in csrc/include/proa/tables.h.

    label: name of the form with the usual group. code, scale: types of the quantised values and of their scales. group:
    columns that share a scale; 0: there are no scales; ANY_GROUP: 0 (all columns), or a multiple of 16. unit_values,
    unit_words: a row's codes lie in units of so many codes in so many 32-bit words. has_min: a weight is code * scale +
    minimum. integers: codes are small integers, or multiples of a half. block_groups: groups that share a second-level
    scale. The last three: bytes for 16 rows, minimums included, of a group, of a block of groups, of the whole panel.
    """

    name: str
    label: str
    code: str
    scale: str
    group: int
    usual_group: int
    code_bits: int
    unit_values: int
    unit_words: int
    has_min: bool
    integers: bool
    block_groups: int
    scale_bytes: int
    block_scale_bytes: int
    tail_bytes: int


@functools.cache
def _formats() -> tuple[FormatFacts, ...]:
    rows = read_table("proa_get_formats", FormatFacts)
    _expect([(row.name.upper(), i) for i, row in enumerate(rows)], [(of.name, of.value) for of in Format])
    return rows


def facts(of: Format) -> FormatFacts:
    """The facts of a format. Raises NativeError without a library."""
    return _formats()[of]


class Stored(IntEnum):
    """Stored types whose scales, if any, are inside their blocks; values as in ggml. `stored_types` has their facts."""

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


class Order(IntEnum):
    """Storage order of a matrix; values as in csrc/src/coded.h."""

    ROWS = 0
    TRANSPOSED = 1  # stored rows are the matrix's columns; unquantised types only
    WORDS = 2  # GPTQ: [columns, rows] transposed; a 32-bit word packs consecutive columns of one row
    AWQ = 3  # [columns, rows] transposed; a 32-bit word packs eight rows of one column, in AWQ's order


class StoredFacts(NamedTuple):
    """A row of the table of stored types: proa_stored_info in tables.h. format: the packed format that holds the blocks
    without rounding, in groups of `group` columns; negative: there is none."""

    name: str
    type: int
    block_values: int
    block_bytes: int
    format: int
    group: int


@functools.cache
def stored_types() -> dict[str, StoredFacts]:
    """The facts of all stored types by name, codes included. Raises NativeError without a library."""
    rows = read_table("proa_get_stored_types", StoredFacts)
    ours = [(of.name, of.value) for of in (*Stored, *Code)]
    _expect([(row.name, row.type) for row in rows], ours)
    return {row.name: row for row in rows}


def stored_facts(of: Stored | Code) -> StoredFacts:
    """The facts of a stored type. Raises NativeError without a library."""
    return stored_types()[of.name]


def _expect(found: Collection[tuple[str, int]], ours: Collection[tuple[str, int]]) -> None:
    """Compare the names and numbers of a table with those that this package declares."""
    if differing := sorted(set(found) ^ set(ours)):
        names = ", ".join(f"{name} ({number})" for name, number in differing)
        raise NativeError(f"This Proa and its native library differ in {names}.", REBUILD)


class Form(NamedTuple):
    """Packed format of a matrix. group: columns that share a scale; 0: all."""

    format: Format
    group: int


def usual_forms() -> dict[str, Form]:
    """Every format with the group that checkpoints usually have, by label. Raises NativeError without a library."""
    return {row.label: Form(Format(i), row.usual_group) for i, row in enumerate(_formats())}


BF16_FORM = Form(Format.BF16, 0)

# E4M3 with a scale per block of 128, tensor or channel: the forms that a GPU can multiply with E4M3 activations.
E4M3_FORMS = (Form(Format.FP8_PANEL, 128), Form(Format.FP8_PANEL, 0), Form(Format.FP8_ROW, 0))


@dataclass(frozen=True)
class Kept:
    """The packed format that holds a checkpoint's type without rounding. block_columns must divide the columns."""

    format: Format
    group: int
    block_columns: int


@functools.cache
def gguf_kept() -> dict[str, Kept]:
    """GGUF type -> packed format. A type without a format of its own is widened, losslessly. Raises NativeError without
    a library."""
    return {
        of.name: Kept(Format(of.format), of.group, of.block_values) for of in stored_types().values() if of.format >= 0
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


@functools.cache
def _all_kept() -> dict[str, Kept]:
    return gguf_kept() | QUANTISED | DUMMY


def kept_form(stored: Collection[str], columns: int) -> Form:
    """The packed form of a stack of matrices stored with the types `stored`: lossless if all have one type that a
    packed format holds, else bfloat16."""
    kept = _all_kept().get(next(iter(stored))) if len(stored) == 1 else None
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
