"""RAM for weights: on huge pages where possible, bound to a NUMA node if asked (csrc/src/arena.h).

Belongs here: owning an arena from Python, mapping another process's, and views of both. Never: the layout of their
contents.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from proa.errors import NativeError
from proa.native.library import Signatures, library

_SHARED, _STRICT_NODE, _SMALL_PAGES = 1, 2, 4
_PAGES = ("small", "anon-huge", "shmem-huge", "hugetlb")  # by PROA_PAGES_*


class _Info(ctypes.Structure):
    """proa_arena_info of native.h."""

    _fields_ = (
        ("bytes", ctypes.c_uint64),
        ("mapped_bytes", ctypes.c_uint64),
        ("touched_bytes", ctypes.c_uint64),
        ("pages", ctypes.c_int32),
        ("node", ctypes.c_int32),
        ("reason", ctypes.c_char * 1000),
    )


SIGNATURES: Signatures = {
    "proa_arena_create": (ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p)),
    "proa_arena_destroy": (ctypes.c_void_p,),
    "proa_arena_interleave": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32),
    "proa_arena_touch": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
    "proa_arena_data": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)),
    "proa_arena_bytes": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)),
    "proa_arena_fd": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "proa_arena_get_info": (ctypes.c_void_p, ctypes.POINTER(_Info)),
    "proa_arena_get_huge_bytes": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)),
}


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(SIGNATURES)


@dataclass(frozen=True)
class ArenaInfo:
    """The memory that an arena got. `pages` is "hugetlb", "shmem-huge", "anon-huge" (not sharable) or "small"."""

    bytes: int
    mapped_bytes: int  # rounded up to whole pages
    touched_bytes: int  # backed by physical memory
    pages: str
    node: int | None  # the NUMA node it is bound to
    reason: str  # why the pages are not of a better kind; "" for the best kind


class _Memory:
    """The native handle. Lives as long as the arena or any view of it; its finalizer frees the memory."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        finalizer = weakref.finalize(self, _native().proa_arena_destroy, handle)
        finalizer.atexit = False  # at exit threads may still read it; the system frees it after them


class Arena:
    """`nbytes` bytes of zeros in RAM, aligned to 2 MiB.

    node: bind the memory to a NUMA node; strict: raise NativeError if that fails. interleave: spread the pages over
    these nodes instead; raises NativeError if the kernel refuses. shared: back it by a file descriptor that other
    processes can map. huge: False only for comparisons. Physical memory is allocated when it is touched, at the latest
    by `view`. Raises ResourceError (with the numbers) if memory is short.
    """

    def __init__(
        self, nbytes: int, node: int | None = None, *, interleave: Sequence[int] = (), shared: bool = False,
        strict: bool = False, huge: bool = True,
    ) -> None:  # fmt: skip
        if not 0 < nbytes < 1 << 63 or not 0 <= (node or 0) < 1 << 31:
            raise ValueError(f"an arena of {nbytes} bytes on node {node}: bytes must be positive, nodes at least 0")
        flags = _SHARED * shared | _STRICT_NODE * strict | _SMALL_PAGES * (not huge)
        handle, data, fd = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        _native().proa_arena_create(nbytes, -1 if node is None else node, flags, ctypes.byref(handle))
        self._memory: _Memory | None = _Memory(handle.value or 0)
        if interleave:
            nodes = (ctypes.c_int32 * len(interleave))(*interleave)
            _native().proa_arena_interleave(handle, nodes, len(interleave))
        _native().proa_arena_data(handle, ctypes.byref(data))
        _native().proa_arena_fd(handle, ctypes.byref(fd))
        self.nbytes = nbytes
        self._data, self._fd = data.value or 0, fd.value

    @property
    def data(self) -> int:
        """The address of the first byte. Valid until `close`, or until the last view is gone if that is later."""
        self._open()
        return self._data

    @property
    def handle(self) -> int:
        """The native handle, for calls into the library."""
        return self._open().handle

    @property
    def fd(self) -> int | None:
        """The file descriptor of the memory, owned by the arena; None for anonymous memory."""
        self._open()
        return self._fd if self._fd >= 0 else None

    @property
    def info(self) -> ArenaInfo:
        got = _Info()
        _native().proa_arena_get_info(self._open().handle, ctypes.byref(got))
        return ArenaInfo(
            bytes=got.bytes,
            mapped_bytes=got.mapped_bytes,
            touched_bytes=got.touched_bytes,
            pages=_PAGES[got.pages],
            node=got.node if got.node >= 0 else None,
            reason=got.reason.decode(errors="replace"),
        )

    @property
    def huge_bytes(self) -> int:
        """Bytes on huge pages now, from /proc; takes milliseconds per gigabyte of the process."""
        got = ctypes.c_uint64()
        _native().proa_arena_get_huge_bytes(self._open().handle, ctypes.byref(got))
        return got.value

    def touch(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Allocate physical memory for `nbytes` from `offset` on (None: to the end). Contents are kept.

        Thread-safe. Raises ResourceError (with the numbers) if memory is short.
        """
        memory, count = self._open(), self._count(offset, nbytes)
        _native().proa_arena_touch(memory.handle, offset, count)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """A touched part as writable bytes, for numpy.frombuffer and torch.frombuffer.

        The memory stays allocated while a view, or an array made from it, is alive, even if the arena is closed.
        """
        memory, count = self._open(), self._count(offset, nbytes)
        self.touch(offset, count)
        array = (ctypes.c_ubyte * count).from_address(self._data + offset)
        array._memory = memory  # type: ignore[attr-defined]  # keeps the memory while the array lives
        return memoryview(array).cast("B")

    def close(self) -> None:
        """Free the memory, at once if no view is alive, else with the last view. Closing twice is allowed."""
        self._memory = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> _Memory:
        if self._memory is None:
            raise NativeError("This arena is closed.", "Make views while it is open; they stay valid afterwards.")
        return self._memory

    def _count(self, offset: int, nbytes: int | None) -> int:
        count = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + count} lie outside of an arena of {self.nbytes} bytes")
        return count


class AttachedArena:
    """The first `nbytes` bytes of another process's shared arena, mapped by its file descriptor.

    The descriptor comes by inheritance (subprocess's pass_fds, which keeps its number) or over a Unix socket
    (socket.send_fds); the mapping holds a duplicate of it, so the caller may close it. The memory stays allocated until
    every process has unmapped it, in any order. The owner must touch it before: an untouched page is allocated at the
    first access here, where a lack of memory kills the process.

    Raises ValueError for a file that is too short, or that could be cut off later, which would kill its readers too.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        held = os.fstat(fd).st_size
        if not 0 < nbytes <= held:
            raise ValueError(f"{nbytes} bytes of an arena were requested, but descriptor {fd} has {held}")
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:  # not a file in memory
            sealed = 0
        if not sealed:
            raise ValueError(f"descriptor {fd} is not an arena's: its file can be cut off")
        self.nbytes = nbytes
        self._map: mmap.mmap | None = mmap.mmap(fd, held)
        self._data = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def data(self) -> int:
        """The address of the first byte, aligned to a page; as long as Arena.data is valid."""
        self._open()
        return self._data

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """A part as writable bytes, which keeps the mapping. Raises ValueError outside of the arena."""
        count = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + count} lie outside of an arena of {self.nbytes} bytes")
        return memoryview(self._open())[offset : offset + count]

    def close(self) -> None:
        """Unmap the memory, at once if no view is alive, else with the last view. Closing twice is allowed."""
        self._map = None

    def _open(self) -> mmap.mmap:
        if self._map is None:
            raise NativeError("This arena is closed.", "Make views while it is open; they stay valid afterwards.")
        return self._map
