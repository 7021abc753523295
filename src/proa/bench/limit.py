"""Measures RAM bandwidth right before and right after each timed run of a benchmark.

On a shared machine the available bandwidth changes within seconds. A run is therefore compared with the two readings
next to it, namely with the larger: other programs can only lower a reading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TypeVar

from proa.config.options import MachineOptions
from proa.machine.load import load_now
from proa.machine.probe import probe
from proa.machine.rates import RamRate
from proa.obs.units import format_rate
from proa.plan.prepare import ram_rate

_T = TypeVar("_T")

AGAIN_S = 1.0  # a reading is reused for runs that start within this time after it


def busy_notes() -> tuple[str, ...]:
    """Return a note if other programs use the CPUs; call it before the benchmark starts. Takes 0.25 s."""
    load = load_now()
    return (f"the machine is busy: {load} before the benchmark, so its figures are too low",) if load.busy else ()


def ram_meter(asked: MachineOptions) -> Callable[[], RamRate]:
    """Return a function that measures RAM bandwidth with the CPUs that an engine with these options may use."""
    return lambda: ram_rate(asked, probe())


class RamReadings:
    """RAM bandwidth readings before, between and after the runs of a benchmark: call `measure_run` for each run, then
    `read`."""

    def __init__(self, meter: Callable[[], RamRate], clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._clock = meter, clock
        self.rates: list[RamRate] = []
        self._before: list[int] = []  # per run: index of the reading before it
        self._read_s = 0.0

    async def measure_run(self, run: Callable[[], Awaitable[_T]]) -> _T:
        """Take a reading, unless the last one is at most AGAIN_S old; then await `run` and return its result."""
        if not self.rates or self._clock() - self._read_s > AGAIN_S:
            await self.read()
        self._before.append(len(self.rates) - 1)
        return await run()

    async def read(self) -> None:
        """Take a reading; to be called after the last run."""
        self.rates.append(await asyncio.to_thread(self._meter))
        self._read_s = self._clock()

    def of_run(self, run: int) -> float:
        """Return the larger of the readings before and after run number `run`, in bytes/s."""
        first = self._before[run]
        return max(rate.bytes_per_s for rate in self.rates[first : first + 2])

    @property
    def typical(self) -> float:
        """Median of `of_run` over all runs, in bytes/s."""
        return median(self.of_run(run) for run in range(len(self._before)))

    @property
    def all_bytes_per_s(self) -> tuple[float, ...]:
        return tuple(rate.bytes_per_s for rate in self.rates)

    def notes(self) -> tuple[str, ...]:
        """Return a note if other programs used the CPUs during a reading."""
        busiest = max(self.rates, key=lambda rate: rate.load.others or 0.0)
        if not busiest.load.busy:
            return ()
        return (f"the machine is busy: {busiest.load} during a RAM reading, so the RAM limit may be too low",)


def excess_notes(share: float | None, rates_bytes_per_s: tuple[float, ...], what: str = "the roof") -> tuple[str, ...]:
    """Return a note if a share of a limit is above 1: the limit was measured too low, it was not exceeded."""
    if share is None or share <= 1:
        return ()
    read = ", ".join(format_rate(rate) for rate in rates_bytes_per_s)
    return (f"{share:.1%} of {what} is impossible: a limit was measured too low (RAM readings: {read})",)
