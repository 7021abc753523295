"""How fast this machine is, measured. Belongs here: short measurements at start. Never: cached results, torch.

Reading is done by the C library's memchr, looking for a byte that is not there: it reads every byte once with the
widest vectors of the CPU, and ctypes releases the interpreter lock around it. Two busy threads of one EPYC 9005
core, best / median of ten 80 ms windows, GB/s: AVX-512 loop in C 42.0 / 41.2, memchr 40.7 / 39.5, numpy dot
41.8 / 39.3 (but its BLAS starts threads of its own), numpy uint64 or-reduce 36.4 / 35.7, numpy float sum 27.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from proa.config.env import read_env
from proa.machine.machine import Machine

CHUNK_BYTES = 4 << 20  # one task: about a millisecond for one core, so that the last one finished hardly counts
LEAST_BUFFER_BYTES = 256 << 20
LEAST_WINDOW_S = 0.02
ROUNDS = 4  # windows per worker count; the best one counts, for neighbours only take bandwidth away


def buffer_bytes(machine: Machine) -> int:
    """Bytes to read: what PROA_RAM_PROBE says, else four times the L3 cache and at least 256 MiB; at most an eighth of
    the free RAM."""
    wanted = read_env().ram_probe_bytes or max(LEAST_BUFFER_BYTES, 4 * (machine.l3_bytes or 0))
    return max(CHUNK_BYTES, min(wanted, machine.available_bytes // 8) // CHUNK_BYTES * CHUNK_BYTES)


def read_bandwidth(threads: int, seconds: float = 0.3, size_bytes: int = LEAST_BUFFER_BYTES) -> float:
    """Bytes per second that up to `threads` threads together read from RAM: the best of several worker counts.

    Takes about `seconds`; longer where first touching `size_bytes` (a multiple of CHUNK_BYTES) of RAM is slow.
    """
    counts = sorted({1, -(-threads // 2), threads})
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with suppress(OSError):  # a kernel without huge pages: then it is measured without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = (ctypes.c_char * size_bytes).from_buffer(memory)
        try:
            begin = time.perf_counter()
            _touch(buffer, threads)
            left_s = seconds - (time.perf_counter() - begin)
            window_s = max(LEAST_WINDOW_S, left_s / (ROUNDS * len(counts)))
            return max(_read_rate(buffer, workers, window_s) for _ in range(ROUNDS) for workers in counts)
        finally:
            del buffer  # mmap refuses to close while a view of it lives


def _touch(buffer: ctypes.Array[ctypes.c_char], threads: int) -> None:
    """Write every page from the threads that will read, so that they lie on those threads' NUMA nodes."""
    memset = ctypes.CDLL(None).memset

    def clear(start: int) -> None:
        memset(ctypes.byref(buffer, start), 0, ctypes.c_size_t(CHUNK_BYTES))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(clear, range(0, len(buffer), CHUNK_BYTES)))


def _read_rate(buffer: ctypes.Array[ctypes.c_char], workers: int, seconds: float) -> float:
    """Bytes per second of `workers` threads that take chunk after chunk for `seconds`."""
    reader = _reader(buffer)
    starts = itertools.cycle(range(0, len(buffer), CHUNK_BYTES))  # next() is atomic under the interpreter lock
    gate = threading.Barrier(workers + 1)

    def work() -> int:
        gate.wait()
        end, done = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            reader(next(starts))
            done += CHUNK_BYTES
        return done

    with ThreadPoolExecutor(workers) as pool:
        tasks = [pool.submit(work) for _ in range(workers)]
        gate.wait()
        begin = time.perf_counter()
        total = sum(task.result() for task in tasks)
        return total / (time.perf_counter() - begin)


def _reader(buffer: ctypes.Array[ctypes.c_char]) -> Callable[[int], None]:
    """read(start): one chunk from `start`."""
    memchr = ctypes.CDLL(None).memchr
    memchr.restype = ctypes.c_void_p

    def read(start: int) -> None:
        memchr(ctypes.byref(buffer, start), 1, ctypes.c_size_t(CHUNK_BYTES))

    return read
