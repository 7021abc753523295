"""Co-fetch in service: the CPU's rate, read from the doorbell's counters, and the shares that follow from it. Never:
the decision (machine/cost/co_fetch.py), addresses, kernels.
"""

from __future__ import annotations

from proa.machine.cost.co_fetch import CpuRate, InPlaceRates, bound_by_ram, co_fetch_shares, half_shares
from proa.native.doorbell import NOTHING_COUNTED, Counters
from proa.ops.residency import IN_PLACE_PAIRS

_NONE = (0,) * (IN_PLACE_PAIRS + 1)  # a step that co-fetches has at most IN_PLACE_PAIRS misses


class CoFetch:
    """`shares`: see `co_fetch_shares`. Until the CPU's rate is known, the GPU reads no expert in RAM."""

    def __init__(self, rates: InPlaceRates | None) -> None:
        """rates: None: shares are `half_shares`, whatever the CPU's rate."""
        self.rates = rates
        self.on = True
        self.forget(NOTHING_COUNTED)

    def forget(self, now: Counters) -> None:
        """Forget the CPU's rate. now: the doorbell's counters."""
        self.shares = half_shares(IN_PLACE_PAIRS) if self.rates is None else _NONE
        self._last = now
        self._cpu = CpuRate()

    @property
    def in_force(self) -> tuple[int, ...]:
        """`shares`; while it is off, zeros."""
        return self.shares if self.on else _NONE

    def update(self, now: Counters) -> tuple[int, ...] | None:
        """Update `shares` from the doorbell's counters, which count from its start. Return them if they changed. While
        it is off, the CPU reads without the GPU beside it, so its rate is not updated."""
        if self.rates is None:
            return None
        last, self._last = self._last, now
        if not self.on:
            return None
        took_s = now.moe_s - last.moe_s
        if not bound_by_ram(now.jobs - last.jobs, now.pairs - last.pairs, took_s, IN_PLACE_PAIRS):
            return None
        self._cpu = self._cpu.after(now.weight_bytes - last.weight_bytes, took_s)
        rate = self._cpu.bytes_per_s
        shares = self.shares if rate is None else co_fetch_shares(IN_PLACE_PAIRS, self.rates, rate)
        if shares == self.shares:
            return None
        self.shares = shares
        return shares
