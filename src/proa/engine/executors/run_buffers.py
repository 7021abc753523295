"""Allocates the buffers of runs that are kept in RAM, one by one, and pins them for a GPU. Never: which runs, copies.

torch's pinned allocator rounds sizes up to powers of two, a third more for Qwen3-30B's runs of 24 MiB, which the plan
does not count. So each buffer is a mapping of its own, registered with the driver: a start pins nothing, and a refusal
costs no more than the buffer that was asked for.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress

import torch
from torch import Tensor

from proa.errors import ResourceError
from proa.hybrid.pinning import pin, unpin


class RunBuffers:
    """Buffers of one size. Thread-safe."""

    def __init__(self, run_bytes: int, device: torch.device) -> None:
        """device: where the KV pages are."""
        self._run_bytes = run_bytes
        self._mapped_bytes = -(-run_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._pinned: dict[int, mmap.mmap] = {}  # by address

    @property
    def nbytes(self) -> int:
        """RAM that a buffer takes: whole memory pages."""
        return self._mapped_bytes

    def new(self) -> Tensor:
        """uint8 [run_bytes] of zeros, pinned if the pages are on a GPU. Raises ResourceError if there is no memory or
        the driver refuses to pin it."""
        try:
            mapped = mmap.mmap(-1, self._mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ResourceError(f"no memory can be allocated ({os.strerror(error.errno or 0)}).") from error
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        buffer.zero_()  # the driver would fault the pages in while it holds a lock that launches wait for
        if self._stream is not None:
            self._stream.synchronize()  # nothing is on it; gives this thread the device's context
            if why := pin(buffer.data_ptr(), self._mapped_bytes):
                raise ResourceError(f"no memory can be pinned ({why}).")
            with self._lock:
                self._pinned[buffer.data_ptr()] = mapped
        return buffer[: self._run_bytes]

    def close(self) -> None:
        """Unpin all buffers. No copy may be using them, and none may be used with the GPU any more."""
        with self._lock:
            for address in self._pinned:
                unpin(address)
            self._pinned.clear()
