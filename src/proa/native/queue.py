"""A queue of jobs for the experts of several layers, run in order by a thread of its own. Never: endless waits."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int64, c_uint64, c_void_p

from proa.native.library import Signatures, finalizer, library
from proa.native.pool import Pool
from proa.native.weights import Experts, Rows

_SIGNATURES: Signatures = {
    "proa_queue_create": (c_void_p, POINTER(c_void_p), c_int64, c_int64, c_int, c_int, POINTER(c_void_p)),
    "proa_queue_destroy": (c_void_p,),
    "proa_queue_submit": (
        c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int,
        POINTER(c_uint64),
    ),
    "proa_queue_done": (c_void_p, c_uint64, POINTER(c_int)),
    "proa_queue_wait": (c_void_p, c_uint64),
}  # fmt: skip


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


class Queue:
    """A job queue. Buffers passed by address must live until their job is done. Raises ValueError for impossible
    sizes."""

    def __init__(
        self, pool: Pool, layers: Sequence[Experts], slots: int, *, lane: int = 0, spin_us: int = 1000
    ) -> None:
        self._handle = c_void_p()
        handles = (c_void_p * len(layers))(*(layer.handle.value for layer in layers))
        _native().proa_queue_create(pool.handle, handles, len(layers), slots, lane, spin_us, ctypes.byref(self._handle))
        finalizer(self, _native().proa_queue_destroy, self._handle, (pool, tuple(layers)))

    def submit(self, layer: int, x: Rows, y: Rows, tokens: int, *, ids: int, weights: int, top_k: int) -> int:
        """Queue a job; returns its number, or 0 if all slots are taken. Raises ValueError for wrong arguments."""
        number = c_uint64()
        _native().proa_queue_submit(
            self._handle, layer, tokens, top_k, ids, weights, x.address, x.stride, y.address, y.stride, y.wide,
            ctypes.byref(number),
        )  # fmt: skip
        return number.value

    def done(self, number: int) -> bool:
        """True if the job is done. Raises the error of this job or of an earlier one."""
        done = c_int()
        _native().proa_queue_done(self._handle, number, ctypes.byref(done))
        return bool(done.value)

    def wait(self, number: int) -> None:
        """Wait until job `number` is done. Raises the error of this job or of an earlier one."""
        _native().proa_queue_wait(self._handle, number)
