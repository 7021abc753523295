"""Reads rows of a checkpoint and packs them into their final memory, by all workers of a pool (csrc/src/fill.h). Never:
which rows go where."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, replace

from proa.native.arena import Arena
from proa.native.formats import PANEL_ROWS, Code, Format, Layout, Order, Stored, layout, stored_facts
from proa.native.library import Signatures, library
from proa.native.pool import Pool


class _Job(ctypes.Structure):
    """proa_fill_job of native.h."""

    _fields_ = [
        ("start", c_uint64), ("stride", c_int64), ("rows", c_int64), ("columns", c_int64), ("group", c_int64),
        ("out", c_void_p), ("out_bytes", c_int64), ("fd", c_int32), ("stored", c_int32), ("order", c_int32),
        ("format", c_int32), ("step", c_int32), ("team", c_int32), ("scales", c_void_p), ("mins", c_void_p),
        ("group_of", c_void_p),
        ("scale_stride", c_int64), ("scale_rows", c_int64), ("scale_first", c_int64), ("scale_group", c_int64),
        ("scale_type", c_int32), ("factor", c_float),
    ]  # fmt: skip


class _Failure(ctypes.Structure):
    _fields_ = [("job", c_int64), ("error", c_int32)]


_SIGNATURES: Signatures = {
    "proa_fill": (c_void_p, POINTER(_Job), c_int64, POINTER(_Failure)),
    "proa_touch": (c_void_p, POINTER(c_int32), POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64), c_int64),
    "proa_decode": (POINTER(_Job), c_void_p),
    "proa_to_float": (c_int, c_void_p, c_int64, c_int64, c_void_p),
}
_PLAIN = -1  # value of _Job.format: not packed
_NOT_FINITE = -1  # value of _Failure.error


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of a quantised matrix in memory: `kind` [scale rows, groups] at address `data`, rows `stride` bytes apart
    (0: a single row).

    rows: matrix rows that share a row of scales. first: the matrix row at which the codes begin. group: columns that
    share a scale; 0: all. mins: address of added minima, laid out like the scales, or 0. factor: scale of the whole
    matrix. group_of: address of each column's group, int32, or 0 if columns are sorted by group. alive: the owners of
    the memory; nbytes: its size.
    """

    kind: Stored | Code
    data: int
    stride: int
    rows: int
    first: int
    group: int
    alive: object
    nbytes: int
    mins: int = 0
    factor: float = 1.0
    group_of: int = 0

    def after(self, columns: int) -> Scales:
        """The scales without those of the first `columns` columns, which are whole groups."""
        if self.group_of:
            return replace(self, group_of=self.group_of + 4 * columns)
        skipped = columns // self.group * stored_facts(self.kind).block_bytes if self.group else 0
        return replace(self, data=self.data + skipped, mins=self.mins + skipped if self.mins else 0)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Location of a parameter's stored rows: `stride` bytes apart, the first at byte `start` of file `fd`, or at
    address `start` if fd is -1. scales: of quantised matrices.
    """

    stored: Stored | Code
    start: int
    stride: int
    fd: int = -1
    order: Order = Order.ROWS
    scales: Scales | None = None

    def after(self, rows: int) -> StoredRows:
        """This location without its first `rows` rows; for AWQ, a multiple of 8."""
        scales = replace(self.scales, first=self.scales.first + rows) if self.scales else None
        return replace(self, start=self.start + self._bytes(rows), scales=scales)

    def every(self, step: int) -> StoredRows | None:
        """Every `step`-th row; None if strides cannot express the scales of those rows."""
        scales = self.scales
        if self.order is not Order.ROWS or (scales and scales.stride and scales.rows > 1):
            return None
        if scales and scales.stride:
            skipped = scales.first * scales.stride
            mins = scales.mins + skipped if scales.mins else 0
            scales = replace(scales, data=scales.data + skipped, mins=mins, first=0, stride=scales.stride * step)
        return replace(self, stride=self.stride * step, scales=scales)

    def _bytes(self, rows: int) -> int:
        match self.order:
            case Order.ROWS:
                return rows * self.stride
            case Order.TRANSPOSED:
                return rows * stored_facts(self.stored).block_bytes
            case Order.WORDS:
                return rows * 4
            case Order.AWQ:
                return rows // 2


@dataclass(frozen=True, slots=True)
class Fill:
    """A job: pack `rows` into `nbytes` bytes at `address`, by the workers of a team.

    to: layout of the panels, `step` panels apart. plain: write bfloat16 rows instead; only rows and columns of `to` are
    then used.
    """

    rows: StoredRows
    to: Layout
    address: int
    nbytes: int
    team: int = 0
    step: int = 1
    plain: bool = False

    def part(self, first: int, count: int) -> Fill:
        """The job restricted to rows [first, first + count); unless plain, `first` must be a multiple of PANEL_ROWS."""
        to = self.to
        if count == to.rows:
            return self
        skipped = first * to.columns * 2 if self.plain else first // PANEL_ROWS * self.step * to.panel_bytes
        return replace(
            self,
            rows=self.rows.after(first),
            to=layout(to.format, count, to.columns, to.group),
            address=self.address + skipped,
            nbytes=self.nbytes - skipped,
        )


class ReadError(Exception):
    """The file of job number `job` cannot be read; errno 0: it ends too early."""

    def __init__(self, job: int, errno: int) -> None:
        super().__init__(f"job {job}: {os.strerror(errno) if errno else 'the file ends too early'}")
        self.job, self.errno = job, errno


class NotFiniteError(Exception):
    """Job number `job` reads a value or a scale that is NaN or infinite, or overflows bfloat16."""

    def __init__(self, job: int) -> None:
        super().__init__(f"job {job}: a stored value is not finite")
        self.job = job


def fill(pool: Pool, jobs: Sequence[Fill]) -> None:
    """Run all jobs. Raises ReadError; NotFiniteError; ValueError if a format cannot hold the stored type, or `nbytes`
    is too small."""
    array = (_Job * len(jobs))(*(_job(j) for j in jobs))
    failure = _Failure()
    _native().proa_fill(pool.handle, array, len(jobs), byref(failure))
    if failure.job >= 0 and failure.error == _NOT_FINITE:
        raise NotFiniteError(failure.job)
    if failure.job >= 0:
        raise ReadError(failure.job, failure.error)


def _job(j: Fill) -> _Job:
    form, of = _PLAIN if j.plain else int(j.to.format), j.rows.scales
    scales = (
        (of.data, of.mins or None, of.group_of or None, of.stride, of.rows, of.first, of.group, of.kind, of.factor)
        if of
        else ()
    )
    return _Job(
        j.rows.start, j.rows.stride, j.to.rows, j.to.columns, j.to.group, j.address, j.nbytes, j.rows.fd,
        j.rows.stored, j.rows.order, form, j.step, j.team, *scales,
    )  # fmt: skip


def decode(rows: StoredRows, count: int, columns: int, out: int) -> None:
    """Dequantise the first `count` rows, in memory, to float32 [count, columns] at address `out`. Raises ValueError."""
    to = layout(Format.BF16, count, columns)
    _native().proa_decode(byref(_job(Fill(rows, to, out, count * columns * 4, plain=True))), out)


def touch(pool: Pool, parts: Sequence[tuple[int, Arena, int, int]]) -> None:
    """Touch each (team, arena, first byte, bytes) by the team's workers, so that it lies on their NUMA node. Raises
    ResourceError."""
    n = len(parts)
    _native().proa_touch(
        pool.handle,
        (c_int32 * n)(*(team for team, *_ in parts)),
        (c_void_p * n)(*(arena.handle for _, arena, _, _ in parts)),
        (c_int64 * n)(*(first for _, _, first, _ in parts)),
        (c_int64 * n)(*(nbytes for *_, nbytes in parts)),
        n,
    )


def to_float(stored: Stored | Code, address: int, nbytes: int, values: int, out: int) -> None:
    """Convert `values` elements in `nbytes` bytes at `address` to float32 at `out`, exactly. Raises ValueError."""
    if values:
        _native().proa_to_float(stored, address, nbytes, values, out)
