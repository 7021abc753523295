"""Co-fetch: how many missed experts of a small step the GPU reads in RAM over PCIe, while the CPU computes the others.
Pure arithmetic over rates. Never: addresses, kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from proa.native.doorbell import Counters

HALF_LIFE_BYTES = 8 << 30  # half-life of the CPU's measured rate, in bytes read: a few tokens
LEAST_BYTES = 64 << 20  # bytes the CPU must have read before its rate is used


@dataclass(frozen=True)
class InPlaceRates:
    """bus: the GPU reads experts in RAM, alone. ram: the sum of GPU and CPU when both read experts in RAM."""

    bus_bytes_per_s: float
    ram_bytes_per_s: float


class CoFetch:
    """`shares`: see `balanced`. The CPU's rate is measured in service, over jobs of few (token, expert) pairs; until it
    is known the GPU reads no expert in RAM."""

    def __init__(self, rates: InPlaceRates, most: int) -> None:
        """most: (token, expert) pairs of a step that co-fetches, and so the most misses."""
        self.rates = rates
        self.shares = (0,) * (most + 1)
        self._most = most
        self._last = Counters(0, 0, 0, 0.0, 0.0)
        self._bytes, self._s = 0.0, 0.0

    def share(self, now: Counters) -> tuple[int, ...] | None:
        """Update `shares` from the doorbell's counters, which count from its start. Return them if they changed."""
        last, self._last = self._last, now
        jobs, pairs = now.jobs - last.jobs, now.pairs - last.pairs
        nbytes, took_s = now.weight_bytes - last.weight_bytes, now.moe_s - last.moe_s
        if not 0 < pairs <= jobs * self._most or took_s <= 0:
            return None
        kept = 0.5 ** (nbytes / HALF_LIFE_BYTES)
        self._bytes, self._s = self._bytes * kept + nbytes, self._s * kept + took_s
        if self._bytes < LEAST_BYTES:
            return None
        shares = balanced(self._most, self.rates, self._bytes / self._s)
        if shares == self.shares:
            return None
        self.shares = shares
        return shares


def balanced(most: int, rates: InPlaceRates, cpu_bytes_per_s: float) -> tuple[int, ...]:
    """Entry m, up to `most`: how many of m missed experts the GPU reads so that the slower of GPU and CPU ends soonest;
    the fewest of equals.

    The GPU gets only the RAM bandwidth that the CPU leaves: beyond it, its reads would slow down the CPU's.
    """
    bus = min(rates.bus_bytes_per_s, rates.ram_bytes_per_s - cpu_bytes_per_s)
    if bus <= 0:
        return (0,) * (most + 1)

    def takes(misses: int, fetched: int) -> float:
        return max(fetched / bus, (misses - fetched) / cpu_bytes_per_s)

    def best(misses: int) -> int:
        """Experts are read whole: the number at which both end together, rounded down or up."""
        together = int(misses * bus / (bus + cpu_bytes_per_s))
        return min(together, min(misses, together + 1), key=partial(takes, misses))  # the first of equals

    return tuple(best(misses) for misses in range(most + 1))
