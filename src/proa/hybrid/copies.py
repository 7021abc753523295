"""Asynchronous copies between RAM and a device, beside the steps: started and polled, never waited for. Never: deciding
what is copied and when."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # (to, from), of equal size and dtype, contiguous

_CHUNK_BYTES = 1 << 18


class Copy(Protocol):
    def done(self) -> bool:
        """True once all bytes have arrived, visible to work that is launched from now on. Raises the copy's error."""


class Copier(Protocol):
    def start(self, pairs: Pairs) -> Copy:
        """Start copies, in order, after those started before. Neither side may be written until the copy is done."""

    def clear(self, memories: Sequence[Tensor]) -> Copy:
        """Start filling memory of the device with zeros, after the copies started before."""

    def close(self) -> None:
        """Finish all copies that were started."""


@dataclass(frozen=True)
class Copiers:
    """weights: copies whole experts. counts: copies a few KB, which must not queue behind experts."""

    weights: Copier
    counts: Copier


class GpuCopier:
    """Copies on a CUDA stream of its own: by DMA from registered RAM; other RAM the driver stages first."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, pairs: Pairs) -> Copy:
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            return self._recorded()

    def clear(self, memories: Sequence[Tensor]) -> Copy:
        with torch.cuda.stream(self._stream):
            for memory in memories:
                memory.zero_()
            return self._recorded()

    def _recorded(self) -> _Recorded:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Recorded(event)

    def close(self) -> None:
        self._stream.synchronize()


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        arrived: bool = self._event.query()  # type: ignore[no-untyped-call]
        return arrived


class HostCopier:
    """The copier of a simulated GPU: a thread that copies at `bytes_per_s`, or unthrottled if None."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._rate = bytes_per_s
        self._waiting: queue.SimpleQueue[tuple[Sequence[tuple[int, int, int]], HostCopy] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="simulated-pcie", daemon=True)
        self._thread.start()

    def start(self, pairs: Pairs) -> Copy:
        return self.start_spans([(to.data_ptr(), source.data_ptr(), to.nbytes) for to, source in pairs], pairs)

    def clear(self, memories: Sequence[Tensor]) -> Copy:
        """At once: the device's own memory does not cross the link."""
        for memory in memories:
            memory.zero_()
        copy = HostCopy(())
        copy.arrived.set()
        return copy

    def start_spans(self, spans: Sequence[tuple[int, int, int]], owners: object) -> HostCopy:
        """Start copies between addresses: (to, from, bytes). owners: of the memory on both sides. They are kept until
        the copies are done, since an engine may be discarded meanwhile."""
        copy = HostCopy(owners)
        self._waiting.put((spans, copy))
        return copy

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        free_s = time.perf_counter()  # when the simulated link has finished all copies so far
        while (job := self._waiting.get()) is not None:
            spans, copy = job
            began_s = time.perf_counter()
            free_s = max(free_s, began_s)
            for to, source, total_bytes in spans:
                for at in range(0, total_bytes, _CHUNK_BYTES):
                    nbytes = min(_CHUNK_BYTES, total_bytes - at)
                    ctypes.memmove(to + at, source + at, nbytes)
                    if self._rate is not None:
                        free_s += nbytes / self._rate
                        time.sleep(max(0.0, free_s - time.perf_counter()))
            copy.seconds = time.perf_counter() - began_s
            copy.arrived.set()
            del job, copy  # the thread waits for the next job, and this one's memory may be freed


class HostCopy:
    """owners: of the memory that is copied; the copier's queue holds this object, and so them, until the copy is done.
    seconds: duration of the copy, once it is done."""

    def __init__(self, owners: object) -> None:
        self.owners, self.arrived, self.seconds = owners, threading.Event(), 0.0

    def done(self) -> bool:
        return self.arrived.is_set()
