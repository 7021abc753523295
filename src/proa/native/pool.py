"""The CPU worker threads, and the instruction set of their kernels. Never: deciding how many, or on which CPUs."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_char_p, c_int32, c_size_t, c_uint64, c_void_p
from types import TracebackType
from typing import TypeVar

from proa.config.env import read_env
from proa.errors import UsageError
from proa.machine.topology import Team
from proa.native.library import Signatures, library


class _Options(ctypes.Structure):
    _fields_ = [
        ("cpus", POINTER(c_int32)), ("team_begin", POINTER(c_int32)), ("teams", c_int32), ("pin", c_int32),
        ("spin_us", c_int32), ("redo", c_int32), ("isa", c_char_p),
        ("homes", POINTER(c_int32)), ("home_begin", POINTER(c_int32)), ("lanes", c_int32), ("nice", c_int32),
    ]  # fmt: skip


_SIGNATURES: Signatures = {
    "proa_select_isa": (c_char_p, c_char_p, c_char_p, c_size_t),
    "proa_pool_create": (POINTER(_Options), POINTER(c_void_p)),
    "proa_pool_destroy": (c_void_p,),
    "proa_pool_use": (c_void_p, POINTER(c_int32), c_int32),
    "proa_pool_redone": (c_void_p, POINTER(c_uint64)),
}
_TEXT_BYTES = 256
_MEASURE_SPIN_US = 50

_T = TypeVar("_T")


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


def select_isa(wanted: str = "") -> tuple[str, str]:
    """Select the best kernels that this CPU runs, or those named `wanted`; returns (name, why none better). Raises
    ValueError if the CPU cannot run them."""
    name, reason = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_TEXT_BYTES)
    _native().proa_select_isa(wanted.encode(), name, reason, _TEXT_BYTES)
    return name.value.decode(), reason.value.decode()


def wished_isa(flag: str | None = None) -> tuple[str, str]:
    """select_isa for the kernels that the user asks for: the flag, else PROA_ISA. Raises UsageError, NativeError."""
    wanted = flag or read_env().isa
    try:
        return select_isa(wanted)
    except ValueError as error:
        where = "--isa" if flag else "PROA_ISA"
        raise UsageError(f"{where} {wanted}: {error}", "Leave it out to use the best that this CPU has.") from None


def _lists(of: Sequence[Sequence[int]]) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
    """Flatten to (all elements, offset of each list and the end), as the C interface takes lists of lists."""
    flat, begins = [one for each in of for one in each], [0, *itertools.accumulate(map(len, of))]
    return (c_int32 * len(flat))(*flat), (c_int32 * len(begins))(*begins)


class Pool:
    """Teams of workers, one per NUMA node; the calling thread works too and needs no CPU here.

    teams: one CPU per worker, for each team; a team may be empty. pin: bind each worker to its CPU, or to all CPUs in
    `homes` of its team if given; `cpus` are the bound ones. lanes: threads that may call at the same time, each on a
    lane of its own; lanes before it have priority. Two suffice for a doorbell and a simulated GPU. nice: added to the
    nice value of workers and doorbells. Raises ValueError; ResourceError; NativeError if a worker cannot be bound.
    """

    def __init__(
        self, teams: Sequence[Sequence[int]], *, isa: str = "", pin: bool = True,
        homes: Sequence[Sequence[int]] = (), spin_us: int = 1000, redo: bool = True, lanes: int = 2,
        nice: int = 0,
    ) -> None:  # fmt: skip
        self.lanes = lanes
        self.isa, self.isa_reason = select_isa(isa)
        self.threads = sum(map(len, teams)) + 1
        self.nodes = len(teams)
        self.cpus = frozenset(cpu for team in homes or teams for cpu in team) if pin else frozenset[int]()
        if homes and len(homes) != len(teams):
            raise ValueError(f"There are {len(teams)} teams, but {len(homes)} homes; there must be one home per team.")
        of_homes = _lists(homes) if homes else (None, None)
        options = _Options(*_lists(teams), len(teams), pin, spin_us, redo, isa.encode(), *of_homes, lanes, nice)
        self._handle = c_void_p()
        _native().proa_pool_create(ctypes.byref(options), ctypes.byref(self._handle))

    @property
    def handle(self) -> c_void_p:
        """The native handle, for calls into the library. Raises ValueError once closed."""
        if not self._handle:
            raise ValueError("The pool is closed.")
        return self._handle

    def use(self, workers: Sequence[int]) -> None:
        """Use only the first `workers[i]` workers of team i, and the caller, from now on; the others sleep.

        Raises ValueError for more than a team has, or for 0 in a team other than the caller's.
        """
        _native().proa_pool_use(self.handle, (c_int32 * len(workers))(*workers), len(workers))
        self.threads = sum(workers) + 1

    def redone(self) -> int:
        """Number of tasks that were run a second time because their worker was preempted."""
        count = c_uint64()
        _native().proa_pool_redone(self.handle, ctypes.byref(count))
        return count.value

    def close(self) -> None:
        """Stop the workers. They must be idle."""
        handle, self._handle = self._handle, c_void_p()
        if handle:
            _native().proa_pool_destroy(handle)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def with_pool(teams: Sequence[Team], measure: Callable[[Pool], _T], *, isa: str = "", pinned: bool = True) -> _T:
    """Call `measure` with a pool on the teams' CPUs. pinned: each thread is bound to its CPU. Raises NativeError,
    ResourceError, and what `measure` raises."""

    def run() -> _T:
        own, *others = teams[0].cpus
        if pinned:
            os.sched_setaffinity(0, {own})
        cpus = [others, *(team.cpus for team in teams[1:])]
        with Pool(cpus, isa=isa, pin=pinned, spin_us=_MEASURE_SPIN_US) as pool:
            return measure(pool)

    with ThreadPoolExecutor(1) as thread:  # the pool's caller is bound to a CPU, but our caller's thread must not be
        return thread.submit(run).result()
