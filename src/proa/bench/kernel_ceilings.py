"""Measures the hardware limits that kernels are compared with, repeatedly within a run.

Memory: the pool's threads read blocks of 1 MB, each taking the next free block, with the widest loads of the kernels'
instruction set, from huge pages of their own node. Arithmetic: the kernels' multiply instructions on registers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from proa.machine.machine import Machine
from proa.machine.topology import Team
from proa.native.ceilings import dispatch_seconds, peak_rate
from proa.native.pool import Pool
from proa.native.ram import LEAST_WINDOW_S, WINDOWS, RamReader, worker_counts

_DISPATCHES = 200  # dispatches per round
_DISPATCH_ROUNDS = 15


class Ceilings(msgspec.Struct, frozen=True):
    """The limits measured at the start of the run."""

    threads: int
    read_gbytes_per_s: dict[str, float]  # by number of reading threads
    peak_gflops: float
    dispatch_us: float  # median time of an empty dispatch of the pool, with one task per thread
    rendezvous_us: float  # median time of an empty dispatch in which every thread must run a task


class CeilingRates(msgspec.Struct, frozen=True):
    """Both limits, measured at one point of the run."""

    read_gbytes_per_s: float
    peak_gflops: float


class CeilingMeter:
    """Measures the limits on `pool`, reading its own memory on each team's node. Raises ResourceError if there is not
    enough memory."""

    def __init__(self, pool: Pool, teams: Sequence[Team], machine: Machine) -> None:
        self._pool = pool
        self._reader = RamReader(pool, teams, machine)
        self.start = self._first()
        rates = self.start.read_gbytes_per_s
        self._counts = sorted({pool.threads, int(max(rates, key=lambda count: rates[count]))})

    def _first(self) -> Ceilings:
        threads = self._pool.threads
        rates = self._reader.rates(worker_counts(threads))
        return Ceilings(
            threads=threads,
            read_gbytes_per_s={str(count): rate / 1e9 for count, rate in rates.items()},
            peak_gflops=self._peak(),
            dispatch_us=self._dispatch_us(meet=False),
            rendezvous_us=self._dispatch_us(meet=True),
        )

    def now(self) -> CeilingRates:
        """Measure both limits; takes about 0.1 s."""
        return CeilingRates(max(self._reader.rates(self._counts).values()) / 1e9, self._peak())

    def close(self) -> None:
        self._reader.close()

    def _dispatch_us(self, *, meet: bool) -> float:
        return 1e6 * median(dispatch_seconds(self._pool, _DISPATCHES, meet=meet) for _ in range(_DISPATCH_ROUNDS))

    def _peak(self) -> float:
        return max(peak_rate(self._pool, self._pool.threads, LEAST_WINDOW_S) for _ in range(WINDOWS // 2)) / 1e9
