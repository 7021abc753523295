"""Counts the gaps between decode steps, beside prompts and undisturbed. Never: choosing how long they may be."""

from __future__ import annotations

import time
from collections.abc import Callable

from proa.engine.scheduling.step_plan import StepPlan
from proa.engine.stats import GapStats


class DecodeGaps:
    """A gap is the time from one step's results to the next one's, if both decode a common request."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last_s = clock, 0.0
        self._requests: set[str] = set()  # that the last step decoded
        self._beside = False  # a prompt was computed since then
        self._counts, self._seconds = [0, 0], [0.0, 0.0]  # undisturbed, beside prompts
        self._over_limit, self._longest_s, self._limit_s = 0, 0.0, 0.0

    def note(self, plan: StepPlan, *, beside: bool, limit_s: float) -> None:
        """Note a step whose results are there. beside: a prefill step is under way beside it; limit_s: the longest gap
        meanwhile, 0: none or unknown."""
        decoded = {item.request.id for item in plan.items if item.start >= item.request.num_prompt}
        self._beside |= beside or len(decoded) < len(plan.items)
        if not decoded:
            return
        now_s = self._clock()
        if not decoded.isdisjoint(self._requests):
            self._add(now_s - self._last_s, limit_s)
        self._requests, self._last_s, self._limit_s, self._beside = decoded, now_s, limit_s, beside

    def _add(self, seconds: float, limit_s: float) -> None:
        self._counts[self._beside] += 1
        self._seconds[self._beside] += seconds
        if self._beside:
            self._longest_s = max(self._longest_s, seconds)
            self._over_limit += 0 < limit_s < seconds

    def stats(self, given_up: int = 0) -> GapStats:
        """given_up: see GapStats."""
        (undisturbed, beside), seconds = self._counts, self._seconds
        return GapStats(
            undisturbed, seconds[0], beside, seconds[1], self._over_limit, given_up, self._longest_s, self._limit_s
        )
