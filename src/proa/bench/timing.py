"""Latency figures of requests, and their percentiles. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import median

import numpy as np

from proa.engine.stats import Stats


@dataclass(frozen=True)
class Timing:
    """Timing of one answered request, in seconds of one monotonic clock. arrivals_s: one entry per piece of the answer
    that has text, at least one; a piece is one token, or several whose text arrived together."""

    start_s: float
    arrivals_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None  # prompt tokens from the prefix cache; None if the server does not report it
    stats: tuple[Stats, ...] = ()  # the engine's counters at each piece; empty for a server

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.start_s

    @property
    def e2e_s(self) -> float:
        """End-to-end latency: time to the last token."""
        return self.arrivals_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for an answer of one token or one piece."""
        if self.output_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between consecutive pieces, which show stalls that a mean hides."""
        return tuple(b - a for a, b in pairwise(self.arrivals_s))

    @property
    def decode_steps(self) -> tuple[tuple[Stats, Stats, int], ...]:
        """For each piece but the first: (counters at the previous piece, counters at this piece, steps in between)."""
        counted = ((a, b, b.scheduler.steps - a.scheduler.steps) for a, b in pairwise(self.stats))
        return tuple(one for one in counted if one[2] > 0)


def stage_us(timings: Iterable[Timing]) -> dict[str, float | None]:
    """Compute median microseconds per decode step by stage of the engine; "host_us_per_step": all but the model."""
    steps = [step for timing in timings for step in timing.decode_steps]
    stages = ("host", "schedule", "inputs", "sample", "publish", "program")

    def us(stage: str) -> list[float]:
        each = attrgetter(f"seconds.{stage}")
        return [1e6 * (each(after) - each(before)) / count for before, after, count in steps]

    return {f"{stage}_us_per_step": median(us(stage)) if steps else None for stage in stages}


def spread_ms(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Compute {"ttft_ms_median": ..., "ttft_ms_p10", "ttft_ms_p90", "ttft_ms_p99"} from times in seconds (None values
    are skipped); all None if there are no values."""
    values = [value * 1e3 for value in seconds if value is not None]
    wanted = {"median": 50.0, "p10": 10.0, "p90": 90.0, "p99": 99.0}
    found = np.percentile(values, list(wanted.values())).tolist() if values else [None] * len(wanted)
    return {f"{name}_ms_{label}": each for label, each in zip(wanted, found, strict=True)}
