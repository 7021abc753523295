"""Measurements of the machine's ceilings (RAM bandwidth, FLOPS, dispatch) and of expert kernels, for benchmarks. Never:
repetitions, statistics."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass

from proa.native.library import Signatures, library
from proa.native.pool import Pool
from proa.native.weights import Experts, Rows


class _Trial(ctypes.Structure):
    """proa_moe_trial of native.h."""

    _fields_ = [
        ("layers", POINTER(c_void_p)), ("layer_count", c_int64), ("ids", c_void_p), ("weights", c_void_p),
        ("routings", c_int64), ("tokens", c_int64), ("top_k", c_int64),
        ("x", c_void_p), ("x_stride", c_int64), ("y", c_void_p), ("y_stride", c_int64),
    ]  # fmt: skip


_SIGNATURES: Signatures = {
    "proa_measure_read": (
        c_void_p, POINTER(c_void_p), POINTER(c_int64), c_int64, c_int, c_double, POINTER(c_double),
    ),
    "proa_measure_peak": (c_void_p, c_int, c_double, POINTER(c_double)),
    "proa_measure_dispatch": (c_void_p, c_int, c_int, POINTER(c_double)),
    "proa_time_moe": (c_void_p, POINTER(_Trial), c_int64, c_int64, POINTER(c_double)),
}  # fmt: skip


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


@dataclass(frozen=True)
class MemoryRange:
    """A range of memory that one team reads."""

    address: int
    nbytes: int


def read_rate(pool: Pool, spans: Sequence[MemoryRange], workers: int, seconds: float) -> float:
    """Bytes/s that `workers` threads read together, team i from spans[i]; a free worker takes the next 1 MB.

    Raises ValueError for more workers than the pool has, or more spans than teams.
    """
    data = (c_void_p * len(spans))(*(span.address for span in spans))
    nbytes = (c_int64 * len(spans))(*(span.nbytes for span in spans))
    rate = c_double()
    _native().proa_measure_read(pool.handle, data, nbytes, len(spans), workers, seconds, byref(rate))
    return rate.value


def peak_rate(pool: Pool, workers: int, seconds: float) -> float:
    """Peak floating-point operations/s of the unit that the pool's kernels multiply with, on registers only."""
    rate = c_double()
    _native().proa_measure_peak(pool.handle, workers, seconds, byref(rate))
    return rate.value


def dispatch_seconds(pool: Pool, phases: int, *, meet: bool) -> float:
    """Mean seconds of a phase with one empty task per thread, over `phases` consecutive phases.

    meet: each task waits until every thread has one; else a fast thread may run them all.
    """
    seconds = c_double()
    _native().proa_measure_dispatch(pool.handle, phases, meet, byref(seconds))
    return seconds.value


@dataclass(frozen=True)
class Routings:
    """Expert choices: addresses of ids (int32) and weights (float32), both [count, tokens, top_k]."""

    ids: int
    weights: int
    count: int
    tokens: int
    top_k: int


class Trial:
    """Timed MoE calls on the same rows: call i uses layer i and routing i, both modulo their number.

    Layers have equal shapes; x, y: bfloat16 rows. The caller keeps the memory behind all addresses alive.
    """

    def __init__(self, pool: Pool, layers: Sequence[Experts], routings: Routings, x: Rows, y: Rows) -> None:
        self._pool, self._layers = pool, tuple(layers)
        handles = (c_void_p * len(layers))(*(layer.handle.value for layer in layers))
        self._trial = _Trial(
            handles, len(layers), routings.ids, routings.weights, routings.count, routings.tokens, routings.top_k,
            x.address, x.stride, y.address, y.stride,
        )  # fmt: skip

    def run(self, first: int, calls: int) -> list[float]:
        """Seconds of each of `calls` calls, from call number `first` on. Raises ValueError."""
        seconds = (c_double * calls)()
        _native().proa_time_moe(self._pool.handle, byref(self._trial), first, calls, seconds)
        return list(seconds)
