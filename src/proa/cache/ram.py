"""Runs of pages in RAM: a buffer per run, evicted least recently used first. Never: files, requests, threads of its
own.

Runs live as long as the process and have no checksums. A run is filled in place: `filling` gives the buffer, and the
run can be found when it is full. A buffer that is read or filled is not reused. Only `filling` may allocate, outside
the lock; all other methods return at once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from proa.errors import ResourceError
from proa.obs.units import format_bytes

log = logging.getLogger(__name__)


class Buffers(Protocol):
    """Allocates buffers of one size. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """RAM that a buffer takes."""

    def new(self) -> Tensor:
        """A buffer, uint8 [at most nbytes]. Raises ResourceError if there is no memory for it."""

    def close(self) -> None:
        """Release everything but the memory of the buffers, none of which may be used afterwards."""


@dataclass(eq=False)
class _Run:
    buffer: Tensor
    readers: int = 0


@dataclass(eq=False)
class Filling:
    """A buffer to be filled. full: set by the thread that fills it, when the buffer holds the run."""

    buffer: Tensor
    full: bool = False


class RamStore:
    """The runs of one root. Thread-safe."""

    def __init__(self, limit_bytes: int, buffers: Buffers) -> None:
        """limit_bytes: most bytes of buffers, which are allocated when they are needed and then reused. If an
        allocation fails, the store does not grow any more."""
        self._most, self._buffers = limit_bytes // buffers.nbytes, buffers
        self._lock = threading.Lock()
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()  # the least recently used first
        self._filling: set[bytes] = set()
        self._free: list[Tensor] = []
        self._num_buffers = 0
        self._warns = True  # the warning is logged once
        self.evicted_runs = 0

    @property
    def stored_bytes(self) -> int:
        return len(self._runs) * self._buffers.nbytes

    @property
    def writes(self) -> bool:
        """True if there is a buffer, or one can be allocated."""
        return self._most > 0

    def has(self, key: bytes) -> bool:
        """True if the run is stored."""
        return key in self._runs

    def touch(self, key: bytes) -> None:
        """Make the run the most recently used, if it is stored."""
        with self._lock:
            self._use(key)

    @contextmanager
    def reading(self, key: bytes) -> Iterator[Tensor | None]:
        """The run's buffer, which is not evicted meanwhile and must not be changed; None if the run is not stored."""
        with self._lock:
            run = self._use(key)
            if run is not None:
                run.readers += 1
        try:
            yield None if run is None else run.buffer
        finally:
            if run is not None:
                with self._lock:
                    run.readers -= 1

    @contextmanager
    def filling(self, key: bytes) -> Iterator[Filling | None]:
        """A buffer for a run that is not stored; it is stored afterwards if `full` was set. None: the run is stored, is
        being filled by another thread, or all buffers are in use."""
        buffer = self._claim(key)
        filling = None if buffer is None else Filling(buffer)
        try:
            yield filling
        finally:
            if filling is not None:
                self._settle(key, filling)

    def close(self) -> None:
        """Forget all runs; no call may follow."""
        with self._lock:
            self._runs.clear()
            self._free.clear()
        self._buffers.close()

    def _use(self, key: bytes) -> _Run | None:
        run = self._runs.get(key)
        if run is not None:
            self._runs.move_to_end(key)
        return run

    def _claim(self, key: bytes) -> Tensor | None:
        with self._lock:
            if key in self._runs or key in self._filling:
                return None
            self._filling.add(key)
            if self._free:
                return self._free.pop()
            grows = self._num_buffers < self._most
            if grows:
                self._num_buffers += 1
        buffer = self._allocated() if grows else None
        if buffer is not None:
            return buffer
        with self._lock:
            buffer = self._free.pop() if self._free else self._evicted()
            if buffer is None:
                self._filling.remove(key)
        return buffer

    def _settle(self, key: bytes, filling: Filling) -> None:
        with self._lock:
            self._filling.remove(key)
            if filling.full:
                self._runs[key] = _Run(filling.buffer)
            else:
                self._free.append(filling.buffer)

    def _allocated(self) -> Tensor | None:
        """Allocate a buffer, which `_claim` has counted. None: memory is short; the store does not grow any more."""
        try:
            return self._buffers.new()
        except ResourceError as error:
            with self._lock:
                self._num_buffers -= 1
                self._most = min(self._most, self._num_buffers)
                held, warns, self._warns = self._most * self._buffers.nbytes, self._warns, False
            if warns:
                log.warning("The prefix cache in RAM stays at %s: %s Serving goes on.", format_bytes(held), error)
            return None

    def _evicted(self) -> Tensor | None:
        """The buffer of the least recently used run that is not being read. The lock is held."""
        key = next((key for key, run in self._runs.items() if not run.readers), None)
        if key is None:
            return None
        self.evicted_runs += 1
        return self._runs.pop(key).buffer
