"""Loads the native library, and turns its error codes into exceptions. Belongs here: code shared by all topics.
Never: functions of one topic; those are declared in a module of their own:

    _SIGNATURES: Signatures = {"proa_pool_create": (c_int32, POINTER(c_void_p))}

    @functools.cache
    def _native() -> ctypes.CDLL:
        return library().bind(_SIGNATURES)

The library lies beside this file, in a wheel as in a checkout. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proa.errors import NOT_FINITE, NativeError, NumericsError, ResourceError

# Function -> the ctypes types of its parameters. All return an error code; see csrc/include/proa/native.h.
Signatures = Mapping[str, tuple[Any, ...]]

ABI_VERSION = 12
PATH = Path(__file__).with_name("libproa_native.so")

REBUILD = "In a checkout run `make native`; else reinstall Proa: pip install --force-reinstall --no-deps proa."
_OK, _ARGUMENT, _MEMORY, _SYSTEM, _WORKER, _NUMERICS = range(6)


@functools.cache
def library() -> Library:
    """The library, loaded at the first call of this process. Raises NativeError if it cannot be used."""
    return Library(PATH)


def finalizer(of: object, destroy: Callable[[ctypes.c_void_p], object], handle: ctypes.c_void_p, keep: object) -> Any:
    """Make the weakref.finalize that destroys a handle when `of` is collected. keep: objects that the handle's thread
    uses; the reference keeps them alive until the handle is destroyed, even if all are garbage together.

    A process forked from this one has neither the thread nor its pinned memory: there the handle is left alone."""
    return weakref.finalize(of, _destroy, destroy, handle, keep, os.getpid())


def _destroy(
    destroy: Callable[[ctypes.c_void_p], object], handle: ctypes.c_void_p, keep: object, process: int
) -> None:  # fmt: skip
    if os.getpid() == process:
        destroy(handle)


class Library:
    """A loaded native library. Raises NativeError if it is missing, broken or of another ABI version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = _load(path)

    def bind(self, signatures: Signatures) -> ctypes.CDLL:
        """Declare `signatures` and return the library. Its functions then check argument types, and raise ValueError
        for wrong arguments, ResourceError if memory ran out, NumericsError for non-finite results, NativeError for any
        other error.
        """
        for name, parameters in signatures.items():
            function = self._function(name)
            function.argtypes = parameters
            function.restype = ctypes.c_int
            function.errcheck = self._check
        return self._dll

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._dll, name)  # not [name], which makes a new function each time
        except AttributeError:
            raise NativeError(f"The native library {self.path} has no function {name}.", REBUILD) from None

    def _check(self, code: int, function: Any, arguments: tuple[Any, ...]) -> int:
        if code != _OK:
            raise error_of(code, self._dll.proa_last_error().decode(errors="replace"))
        return code


def error_of(code: int, text: str) -> Exception:
    """Make the exception for an error code of the library and its message."""
    if code == _ARGUMENT:
        return ValueError(text)
    if code == _MEMORY:
        return ResourceError(text, "Free some memory, or use less of it.")
    if code in (_SYSTEM, _WORKER):
        return NativeError(text)
    if code == _NUMERICS:
        return NumericsError(text, NOT_FINITE)
    return NativeError(f"The native library failed with the unknown code {code}: {text}", REBUILD)


def _load(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise NativeError(f"Proa's native library is missing: there is no {path}.", REBUILD)
    try:
        dll = ctypes.CDLL(str(path))
        version = dll.proa_abi_version()
    except (OSError, AttributeError) as error:
        raise NativeError(f"Proa's native library {path} cannot be loaded: {error}.", REBUILD) from error
    if version != ABI_VERSION:
        raise NativeError(
            f"Proa's native library {path} has ABI version {version}; this Proa needs {ABI_VERSION}.",
            REBUILD,
        )
    dll.proa_last_error.argtypes = ()
    dll.proa_last_error.restype = ctypes.c_char_p
    return dll
