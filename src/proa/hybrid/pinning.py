"""RAM that a GPU reads and writes by itself: registered with the driver. Never: what is copied, who reads in place.

By the driver's own interface, since a refusal by the runtime's would be raised again by the next call of torch.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.obs.units import format_bytes

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_*
_LIBRARY = "libcuda.so.1"


@dataclass
class Registered:
    """`nbytes` that copies to and from the device need no detour for. `in_place`: kernels read them at the addresses
    that the CPU knows them by. `why`: how long it took, or what the driver said."""

    spans: list[tuple[int, int]]
    in_place: bool
    why: str

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.spans)

    def close(self) -> None:
        """Before the memory goes back. No copy or kernel may be using it."""
        cuda = ctypes.CDLL(_LIBRARY)
        for address, _ in self.spans:
            cuda.cuMemHostUnregister(ctypes.c_void_p(address))
        self.spans.clear()


def register(spans: Sequence[tuple[int, int]], device: torch.device) -> Registered:
    """(address, bytes) of RAM, in whole pages, up to the first that the driver refuses. Takes a second for 12 to 55 GB.

    A copy must lie within one span.
    """
    torch.cuda.synchronize(device)  # this thread has the device's context now
    cuda = ctypes.CDLL(_LIBRARY)
    begin, done, in_place = time.perf_counter(), list[tuple[int, int]](), True
    for address, nbytes in spans:
        place, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        if code := cuda.cuMemHostRegister_v2(place, size, _PORTABLE | _MAPPED):
            left = sum(size for _, size in spans) - sum(size for _, size in done)
            return Registered(done, False, f"the driver refused {format_bytes(left)}: {_name(cuda, code)}")
        done.append((address, nbytes))
        seen = ctypes.c_uint64()
        if cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(seen), place, 0) or seen.value != address:
            in_place = False
    return Registered(done, in_place, f"registered in {time.perf_counter() - begin:.1f} s")


def _name(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"error %d" % code).decode()
