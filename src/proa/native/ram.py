"""Measures RAM read bandwidth: a pool's workers read, each team from its own NUMA node, on huge pages if the kernel
gives them. Belongs here: amount of memory, repetitions, duration. Never: which CPUs.

To read RAM and not caches, the buffer is four times the last-level cache. The best of several windows of at least 12 ms
counts, since other programs can only take bandwidth away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from proa.config.env import read_env
from proa.machine.load import LoadMeter
from proa.machine.machine import Machine
from proa.machine.rates import RamRate
from proa.machine.topology import UNBOUND, Team
from proa.native.arena import Arena
from proa.native.ceilings import MemoryRange, read_rate
from proa.native.pool import Pool, with_pool

MEASURE_S = 0.3
LEAST_WINDOW_S = 0.012
WINDOWS = 4  # windows per number of workers, interleaved
LEAST_BUFFER_BYTES = 256 << 20
_CHUNK_BYTES = 4 << 20  # touched by one call
_LEAST_SPAN_BYTES = 1 << 20  # a worker reads this much at a time


def buffer_bytes(machine: Machine) -> int:
    """Size of the buffer: PROA_RAM_PROBE, else four times the L3 cache but at least 256 MiB; at most an eighth of the
    free RAM."""
    wanted = read_env().ram_probe_bytes or max(LEAST_BUFFER_BYTES, 4 * (machine.l3_bytes or 0))
    return max(_CHUNK_BYTES, min(wanted, machine.available_bytes // 8) // _CHUNK_BYTES * _CHUNK_BYTES)


def worker_counts(threads: int) -> tuple[int, ...]:
    """Numbers of workers to try: bandwidth often saturates before all cores are used."""
    return tuple(sorted({1, -(-threads // 2), -(-3 * threads // 4), threads - 1 or 1, threads}))


class RamReader:
    """Buffers for the teams of `pool` to read, allocated until `close`. Raises ResourceError if memory is short.

    pinned: the threads that touch a buffer run on its team's CPUs, so that it lies on their node even if it cannot be
    bound.
    """

    def __init__(self, pool: Pool, teams: Sequence[Team], machine: Machine, *, pinned: bool = True) -> None:
        self._pool = pool
        share = buffer_bytes(machine) // len(teams)
        sizes = [max(_LEAST_SPAN_BYTES, min(share, (t.memory_bytes or machine.available_bytes) // 8)) for t in teams]
        self._arenas = [
            Arena(nbytes, None if team.node == UNBOUND else team.node)
            for team, nbytes in zip(teams, sizes, strict=True)
        ]
        with ThreadPoolExecutor(len(teams)) as each:
            list(each.map(lambda arena, team: _touch(arena, team.cpus, pinned), self._arenas, teams))
        self._spans = [MemoryRange(arena.data, arena.nbytes) for arena in self._arenas]

    @property
    def pages(self) -> tuple[str, ...]:
        """The kinds of pages of the buffers: see ArenaInfo."""
        return tuple(sorted({arena.info.pages for arena in self._arenas}))

    def rate(self, workers: int, seconds: float = LEAST_WINDOW_S) -> float:
        """Bytes/s that `workers` of the pool's workers read together."""
        return read_rate(self._pool, self._spans, workers, seconds)

    def rates(self, counts: Sequence[int], seconds: float = LEAST_WINDOW_S) -> dict[int, float]:
        """Bytes/s for each number of workers: the best of WINDOWS windows, interleaved so that noise hits all alike."""
        best = dict.fromkeys(counts, 0.0)
        for _ in range(WINDOWS):
            for count in counts:
                best[count] = max(best[count], self.rate(count, seconds))
        return best

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


def usual_seconds() -> float:
    """How long measuring takes: MEASURE_S, in proportion less if PROA_RAM_PROBE is less than LEAST_BUFFER_BYTES."""
    return MEASURE_S * min(1.0, (read_env().ram_probe_bytes or LEAST_BUFFER_BYTES) / LEAST_BUFFER_BYTES)


def measure_ram(
    machine: Machine, teams: Sequence[Team], *, pinned: bool = True, seconds: float | None = None
) -> RamRate:  # fmt: skip
    """Measure how fast the teams' CPUs read RAM, with the widest loads that the CPU has, regardless of PROA_ISA.

    Takes about `seconds`, by default usual_seconds(); longer if touching the memory is slow. pinned: each thread is
    bound to its CPU. Raises NativeError, ResourceError.
    """
    end_s = time.perf_counter() + (usual_seconds() if seconds is None else seconds)

    def measure(pool: Pool) -> RamRate:
        with closing(RamReader(pool, teams, machine, pinned=pinned)) as reader:
            counts = worker_counts(pool.threads)
            left_s = end_s - time.perf_counter()
            meter = LoadMeter()
            rates = reader.rates(counts, max(LEAST_WINDOW_S, left_s / (WINDOWS * len(counts))))
            fastest = max(counts, key=lambda count: rates[count])
            return RamRate(bytes_per_s=rates[fastest], threads=fastest, pages=reader.pages, load=meter.load())

    return with_pool(teams, measure, pinned=pinned)


def _touch(arena: Arena, cpus: Sequence[int], pinned: bool) -> None:
    """Touch the whole arena with one thread per CPU."""
    bind = (lambda: os.sched_setaffinity(0, cpus)) if pinned else None
    with ThreadPoolExecutor(len(cpus), initializer=bind) as threads:
        list(threads.map(lambda at: arena.touch(at, min(_CHUNK_BYTES, arena.nbytes - at)),
                         range(0, arena.nbytes, _CHUNK_BYTES)))  # fmt: skip
