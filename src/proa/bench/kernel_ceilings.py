"""The physical limits beside which kernels are judged, measured again and again in the same run. Never: kernels.

Memory: threads of the pool read 1 MB after the other, whoever is free the next, with the widest loads of the kernels'
instruction set, from huge pages of their own node. Arithmetic: the unit that the kernels multiply with, on registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from proa.machine.machine import Machine
from proa.machine.rates import buffer_bytes
from proa.machine.topology import UNBOUND, Team
from proa.native.arena import Arena
from proa.native.ceilings import Span, dispatch_seconds, peak_rate, read_rate
from proa.native.pool import Pool

WINDOW_S = 0.012
WINDOWS = 4  # of a measurement; the best counts, for neighbours only take away
_LEAST_SPAN_BYTES = 1 << 20
_DISPATCHES = 200  # phases of a round
_DISPATCH_ROUNDS = 15


class Ceilings(msgspec.Struct, frozen=True):
    """What the machine could do when the run began."""

    threads: int
    read_gbytes_per_s: dict[str, float]  # by number of reading threads
    peak_gflops: float
    dispatch_us: float  # of an empty phase of the pool, one task for each thread; the median
    rendezvous_us: float  # of one in which every thread takes part

    @property
    def best_read_gbytes_per_s(self) -> float:
        return max(self.read_gbytes_per_s.values())


class Rates(msgspec.Struct, frozen=True):
    """Both limits at one moment."""

    read_gbytes_per_s: float
    peak_gflops: float


class CeilingMeter:
    """Measures on `pool`, from memory of its own on each team's node. Raises ResourceError if memory is short."""

    def __init__(self, pool: Pool, teams: Sequence[Team], machine: Machine) -> None:
        self._pool = pool
        nbytes = max(_LEAST_SPAN_BYTES, buffer_bytes(machine) // len(teams))
        self._arenas = [Arena(nbytes, None if team.node == UNBOUND else team.node) for team in teams]
        for arena in self._arenas:
            arena.touch()
        self._spans = [Span(arena.data, nbytes) for arena in self._arenas]
        self.start = self._first()
        rates = self.start.read_gbytes_per_s
        self._counts = sorted({pool.threads, int(max(rates, key=lambda count: rates[count]))})

    def _first(self) -> Ceilings:
        threads = self._pool.threads
        rates = dict.fromkeys(sorted({1, -(-threads // 2), -(-3 * threads // 4), threads - 1 or 1, threads}), 0.0)
        for _ in range(WINDOWS):
            for count in rates:
                rates[count] = max(rates[count], self._read(count))
        return Ceilings(
            threads=threads,
            read_gbytes_per_s={str(count): rate for count, rate in rates.items()},
            peak_gflops=self._peak(),
            dispatch_us=self._dispatch_us(meet=False),
            rendezvous_us=self._dispatch_us(meet=True),
        )

    def now(self) -> Rates:
        """Both limits as they are at this moment, in about a tenth of a second."""
        read = max(self._read(count) for _ in range(WINDOWS) for count in self._counts)
        return Rates(read, self._peak())

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()

    def _dispatch_us(self, *, meet: bool) -> float:
        return 1e6 * median(dispatch_seconds(self._pool, _DISPATCHES, meet=meet) for _ in range(_DISPATCH_ROUNDS))

    def _read(self, workers: int) -> float:
        return read_rate(self._pool, self._spans, workers, WINDOW_S) / 1e9

    def _peak(self) -> float:
        return max(peak_rate(self._pool, self._pool.threads, WINDOW_S) for _ in range(WINDOWS // 2)) / 1e9
