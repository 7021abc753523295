"""How fast RAM is while a bench runs: read right before and right after each timed run. Never: roofs, runs.

A machine that others use changes within seconds, so a run is judged by the two readings beside it, and of these by the
larger: other programs can only take bandwidth away.
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

AGAIN_S = 1.0  # runs that come sooner after a reading than this share it


def busy_notes() -> tuple[str, ...]:
    """A note if other programs use the CPUs now, before the bench does anything. Takes 0.25 s."""
    load = load_now()
    return (f"the machine is busy: {load} before this began, so the figures are too low",) if load.busy else ()


def ram_meter(asked: MachineOptions) -> Callable[[], RamRate]:
    """A reading of RAM by the CPUs that an engine with these options may use."""
    return lambda: ram_rate(asked, probe())


class Readings:
    """RAM's speed beside the runs of one bench: `beside` each of them, then `end`."""

    def __init__(self, meter: Callable[[], RamRate], clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._clock = meter, clock
        self.rates: list[RamRate] = []
        self._before: list[int] = []  # of each run, the reading before it
        self._read_s = 0.0

    async def beside(self, run: Callable[[], Awaitable[_T]]) -> _T:
        """What the run returns; RAM is read before it unless that was done a moment ago."""
        if not self.rates or self._clock() - self._read_s > AGAIN_S:
            await self._read()
        self._before.append(len(self.rates) - 1)
        return await run()

    async def end(self) -> None:
        """Read once more, after the last run."""
        await self._read()

    def of(self, run: int) -> float:
        """Bytes/s: the larger of the readings before and after run `run`."""
        first = self._before[run]
        return max(rate.bytes_per_s for rate in self.rates[first : first + 2])

    @property
    def typical(self) -> float:
        """Bytes/s: the median over the runs."""
        return median(self.of(run) for run in range(len(self._before)))

    @property
    def all_bytes_per_s(self) -> tuple[float, ...]:
        return tuple(rate.bytes_per_s for rate in self.rates)

    def notes(self) -> tuple[str, ...]:
        """Whether other programs were at work while RAM was read."""
        busiest = max(self.rates, key=lambda rate: rate.load.others or 0.0)
        if not busiest.load.busy:
            return ()
        return (f"the machine is busy: {busiest.load} while RAM was read, so its limit may be too low",)

    async def _read(self) -> None:
        self.rates.append(await asyncio.to_thread(self._meter))
        self._read_s = self._clock()


def excess_notes(share: float | None, rates_bytes_per_s: tuple[float, ...], what: str = "the roof") -> tuple[str, ...]:
    """What a share above 1 means: not that a limit was exceeded, but that it was measured too low."""
    if share is None or share <= 1:
        return ()
    read = ", ".join(format_rate(rate) for rate in rates_bytes_per_s)
    return (f"{share:.1%} of {what} cannot be: a limit was measured too low (RAM was read at {read})",)
