"""Functions of the CUDA driver that torch lacks: copies, stores, waits and calls of native functions in stream order,
which a graph captures. Never: what they are for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

import torch

from proa.errors import NativeError

LIBRARY = "libcuda.so.1"
# CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: there is none for 32 bits, and every GPU that Proa knows has both
# or, under some drivers, neither.
_64_BIT_STREAM_MEM_OPS = 122
_WAIT_AND = 2  # CU_STREAM_WAIT_VALUE_AND
_REMEDY = "`proa doctor` shows the driver; `--doorbell auto` takes what works."

_SIGNATURES = {
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuLaunchHostFunc": (c_void_p, c_void_p, c_void_p),
}


class Driver:
    """The calling thread must have a CUDA context. Methods raise NativeError for an error code of the driver; those
    with a stream launch, and do not wait."""

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._cuda = ctypes.CDLL(path)
        except OSError as error:
            raise NativeError(f"There is no CUDA driver: {error}.", _REMEDY) from error
        self._functions: dict[str, Callable[..., int]] = {}

    def has_stream_mem_ops(self, device: torch.device) -> bool:
        found = c_int()
        self._call("cuDeviceGetAttribute", ctypes.addressof(found), _64_BIT_STREAM_MEM_OPS, device.index or 0)
        return bool(found.value)

    def device_address(self, host_address: int) -> int:
        """Return the device address of pinned host memory."""
        found = c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.addressof(found), host_address, 0)
        return found.value

    def stream(self, device: torch.device) -> int:
        """Return the handle of the current stream."""
        stream: int = torch.cuda.current_stream(device).cuda_stream
        return stream

    def copy_to_host(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Copy to pinned memory."""
        self._call("cuMemcpyDtoHAsync_v2", to, source, nbytes, stream)

    def copy_to_device(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Copy from pinned memory."""
        self._call("cuMemcpyHtoDAsync_v2", to, source, nbytes, stream)

    def store(self, stream: int, device_address: int, value: int) -> None:
        """Store 32 bits, as a release: a reader that sees the value sees what the stream wrote before."""
        self._call("cuStreamWriteValue32_v2", stream, device_address, value, 0)

    def wait_for_bits(self, stream: int, device_address: int, bits: int) -> None:
        """Wait until at least one of `bits` is set in the 32-bit word."""
        self._call("cuStreamWaitValue32_v2", stream, device_address, bits, _WAIT_AND)

    def call(self, stream: int, function: int, argument: int) -> None:
        """Call `void function(void*)` on a thread of the driver."""
        self._call("cuLaunchHostFunc", stream, function, argument)

    def _call(self, name: str, *arguments: int) -> None:
        function = self._functions.get(name) or self._function(name)
        if code := function(*arguments):
            raise NativeError(f"{name} failed: {error_name(self._cuda, code)}.", _REMEDY)

    def _function(self, name: str) -> Callable[..., int]:
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            raise NativeError(f"The CUDA driver is too old: it has no {name}.", _REMEDY) from None
        function.argtypes = _SIGNATURES[name]
        found: Callable[..., int] = function
        self._functions[name] = found
        return found


def error_name(cuda: ctypes.CDLL, code: int) -> str:
    """The driver's name of an error code."""
    text = c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"error %d" % code).decode()
