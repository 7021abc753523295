"""Registration of RAM with the CUDA driver, for DMA and for kernels that read RAM in place. Never: copies, kernels.

This calls the driver API: an error of the runtime API is sticky, and the next call of torch would raise it again.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.hybrid.cuda_driver import LIBRARY, error_name
from proa.obs.units import format_bytes

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_*


@dataclass
class Registered:
    """Registered RAM. in_place: kernels can read it at its host addresses. why: how long registering took, or the
    driver's error. complete: all of it was registered."""

    spans: list[tuple[int, int]]
    in_place: bool
    why: str
    complete: bool = True

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.spans)

    def close(self) -> None:
        """Unregister, before the memory is freed. No copy or kernel may be using it."""
        cuda = ctypes.CDLL(LIBRARY)
        for address, _ in self.spans:
            cuda.cuMemHostUnregister(ctypes.c_void_p(address))
        self.spans.clear()


def register(spans: Sequence[tuple[int, int]], device: torch.device) -> Registered:
    """Register spans of RAM, (address, bytes) in whole pages, up to the first that the driver refuses. Takes a second
    for 12 to 55 GB.

    A copy must lie within one span.
    """
    torch.cuda.synchronize(device)  # gives this thread the device's context
    cuda = ctypes.CDLL(LIBRARY)
    begin, done, in_place = time.perf_counter(), list[tuple[int, int]](), True
    for address, nbytes in spans:
        if code := _register(cuda, address, nbytes):
            left = sum(size for _, size in spans) - sum(size for _, size in done)
            return Registered(
                done, False, f"the driver refused {format_bytes(left)}: {error_name(cuda, code)}", complete=False
            )
        done.append((address, nbytes))
        seen = ctypes.c_uint64()
        if cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(seen), ctypes.c_void_p(address), 0) or seen.value != address:
            in_place = False
    return Registered(done, in_place, f"registered in {time.perf_counter() - begin:.1f} s")


def pin(address: int, nbytes: int) -> str | None:
    """Register one span of whole pages. The calling thread must have the device's context; no step is waited for.
    Returns the driver's error, or None."""
    cuda = ctypes.CDLL(LIBRARY)
    code = _register(cuda, address, nbytes)
    return error_name(cuda, code) if code else None


def unpin(address: int) -> None:
    """Unregister a span, before its memory is freed. No copy or kernel may be using it."""
    ctypes.CDLL(LIBRARY).cuMemHostUnregister(ctypes.c_void_p(address))


def _register(cuda: ctypes.CDLL, address: int, nbytes: int) -> int:
    """Returns the driver's code; 0: success."""
    code: int = cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE | _MAPPED)
    return code
