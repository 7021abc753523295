"""How many of a few tokens' misses the GPU reads in RAM itself while the CPU computes the others: pure arithmetic over
rates. Never: addresses, kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from proa.native.doorbell import Counters

HALF_LIFE_BYTES = 8 << 30  # of what the CPU read: its rate is that of the last few tokens
LEAST_BYTES = 64 << 20  # read before its rate counts


@dataclass(frozen=True)
class InPlaceRates:
    """bus: at which the GPU reads experts in RAM alone; ram: at which GPU and CPU read them together."""

    bus_bytes_per_s: float
    ram_bytes_per_s: float


class CoFetch:
    """The CPU's rate is measured in service, over jobs of few pairs; until then the GPU reads none."""

    def __init__(self, rates: InPlaceRates, most: int) -> None:
        """most: pairs of a step of few tokens, and thus misses."""
        self.rates = rates
        self.shares = (0,) * (most + 1)
        self._most = most
        self._last = Counters(0, 0, 0, 0.0, 0.0)
        self._bytes, self._s = 0.0, 0.0

    def share(self, now: Counters) -> tuple[int, ...] | None:
        """What `shares` are from now on, if that changes. `now`: of the doorbell, since it was made."""
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
    """[m]: of m experts, up to `most`, how many the GPU reads so that both end soonest; as few as that takes.

    Where the CPU uses RAM up, the GPU's reads would come out of the CPU's: it gets only what is left of the RAM's rate.
    """
    bus = min(rates.bus_bytes_per_s, rates.ram_bytes_per_s - cpu_bytes_per_s)
    if bus <= 0:
        return (0,) * (most + 1)

    def takes(misses: int, fetched: int) -> float:
        return max(fetched / bus, (misses - fetched) / cpu_bytes_per_s)

    def best(misses: int) -> int:
        """Parts of experts are not read: as many whole ones as end together, or one more."""
        together = int(misses * bus / (bus + cpu_bytes_per_s))
        return min(together, min(misses, together + 1), key=partial(takes, misses))  # the first of equals

    return tuple(best(misses) for misses in range(most + 1))
