"""Co-fetch: how many missed experts of a small step the GPU reads in RAM over PCIe, while the CPU computes
the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

HALF_LIFE_BYTES = 8 << 30  # half-life of the CPU's measured rate, in bytes read: a few tokens
LEAST_BYTES = 64 << 20  # bytes the CPU must have read before its rate is used
UPDATE_STEPS = 32  # with steps in flight, shares are updated every so many: the CPU's rate changes slowly


@dataclass(frozen=True)
class InPlaceRates:
    """Read rates of experts in RAM. bus: the GPU alone, over PCIe. ram: GPU and CPU together, both reading."""

    bus_bytes_per_s: float
    ram_bytes_per_s: float


@dataclass(frozen=True)
class CpuRate:
    """The rate at which the CPU reads experts in small steps: sums that decay with a half-life of HALF_LIFE_BYTES."""

    nbytes: float = 0.0
    seconds: float = 0.0

    def after(self, nbytes: int, took_s: float) -> CpuRate:
        """The estimate after jobs that read `nbytes` of weights in took_s."""
        kept = 0.5 ** (nbytes / HALF_LIFE_BYTES)
        return CpuRate(self.nbytes * kept + nbytes, self.seconds * kept + took_s)

    @property
    def bytes_per_s(self) -> float | None:
        """None until LEAST_BYTES were read."""
        return None if self.nbytes < LEAST_BYTES else self.nbytes / self.seconds


def bound_by_ram(jobs: int, pairs: int, took_s: float, most_pairs: int) -> bool:
    """True if these jobs tell the CPU's read rate: at most `most_pairs` (token, expert) pairs per job on average. Jobs
    of prompts are bound by arithmetic."""
    return 0 < pairs <= jobs * most_pairs and took_s > 0


def update_is_due(launched: int, ended: int) -> bool:
    """True if shares may change before step number `launched` (from 1). ended: steps that have ended."""
    return ended == launched - 1 or launched % UPDATE_STEPS == 0


def co_fetch_shares(most: int, rates: InPlaceRates, cpu_bytes_per_s: float) -> tuple[int, ...]:
    """Entry m, up to `most`: how many of m missed experts the GPU reads so that the slower of GPU and CPU ends soonest;
    the fewest of equals.

    The GPU gets only the RAM bandwidth that the CPU leaves: beyond it, its reads would slow down the CPU's.
    """
    bus = min(rates.bus_bytes_per_s, rates.ram_bytes_per_s - cpu_bytes_per_s)
    if bus <= 0:
        return (0,) * (most + 1)

    def duration(misses: int, fetched: int) -> float:
        return max(fetched / bus, (misses - fetched) / cpu_bytes_per_s)

    def best(misses: int) -> int:
        """Experts are read whole: the number at which both end together, rounded down or up."""
        together = int(misses * bus / (bus + cpu_bytes_per_s))
        return min(together, min(misses, together + 1), key=partial(duration, misses))  # the first of equals

    return tuple(best(misses) for misses in range(most + 1))


def half_shares(most: int) -> tuple[int, ...]:
    """Entry m, up to `most`: half of m missed experts, rounded up, so that a single one is read too."""
    return tuple((misses + 1) // 2 for misses in range(most + 1))
