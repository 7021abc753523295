"""Sends messages to a socket from an idle worker of a pool, so that the caller never blocks. Never: message framing."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_size_t, c_void_p

from proa.native.library import Signatures, finalizer, library
from proa.native.pool import Pool

_SIGNATURES: Signatures = {
    "proa_outbox_create": (c_void_p, c_int, POINTER(c_void_p)),
    "proa_outbox_destroy": (c_void_p,),
    "proa_outbox_write": (c_void_p, c_void_p, c_size_t),
    "proa_outbox_flush": (c_void_p,),
}


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


class Outbox:
    """At most one per pool; called from the thread that runs the pool's programs. At most one message is pending: it
    has been sent when the next one is written, when a program begins, and when `flush` returns."""

    def __init__(self, pool: Pool, socket: int) -> None:
        """socket: descriptor of a stream socket, open as long as this object. Raises ValueError if the pool has an
        outbox already."""
        self._handle = c_void_p()
        _native().proa_outbox_create(pool.handle, socket, ctypes.byref(self._handle))
        self._destroy = finalizer(self, _native().proa_outbox_destroy, self._handle, pool)
        self._write = _native().proa_outbox_write

    def write(self, message: bytes) -> None:
        """Hand a message to a worker to send. Raises NativeError if it, or the one before it, cannot be sent."""
        self._write(self._handle, message, len(message))

    def flush(self) -> None:
        """Wait until the pending message is sent. Raises NativeError if it cannot be sent."""
        _native().proa_outbox_flush(self._handle)
