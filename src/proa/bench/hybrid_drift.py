"""Computes the figures of `proa bench hybrid --router drift`: before the hot experts change, right after, and until the
placement has adapted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proa.bench.hybrid_ask import TimedAnswer
from proa.bench.hybrid_figures import DecodeInterval, Moment, hits_of
from proa.bench.hybrid_hits import Trace, best_fixed_set, looks_until_good, lru_hits

WINDOWS = 10  # windows per --drift-tokens; each has its own figures
GOOD_WINDOW = 20  # looks (counts of expert selections) over which hits are compared with an LRU cache's


def drift_tokens_each(drift_tokens: int) -> int:
    """Return the tokens that each request generates before the drift, and again after it: --drift-tokens plus one
    window, in which the placement should have adapted."""
    return drift_tokens + _window(drift_tokens) + 1


def _window(drift_tokens: int) -> int:
    return drift_tokens // WINDOWS


def drift_figures(
    before: Sequence[TimedAnswer], after: Sequence[TimedAnswer], trace: Trace, slots: Sequence[int], drift_tokens: int
) -> dict[str, float | None]:
    """Compute the figures of each window from the same requests' answers before and after the drift.

    trace: all looks since the engine's start. slots: experts per layer in VRAM. Window names are the tokens per
    request since the drift. tokens_until_good: tokens until hits reach GOOD_SHARE of an LRU cache's.
    """
    window, found = _window(drift_tokens), lru_hits(trace, slots)
    before_it, after_it = (_common(of, drift_tokens_each(drift_tokens)) for of in (before, after))
    figures: dict[str, float | None] = {"drift_tokens": drift_tokens, "window_tokens": window}
    intervals = {"before": DecodeInterval(before_it[-1 - window], before_it[-1])}
    intervals |= {
        f"at_{i}": DecodeInterval(after_it[i], after_it[i + window]) for i in range(0, drift_tokens + 1, window)
    }
    for name, interval in intervals.items():
        looks = slice(interval.begin.stats.residency.looks, interval.end.stats.residency.looks)
        best = best_fixed_set(trace[looks], slots, [0] * len(slots))
        figures |= {
            f"tokens_per_s_{name}": interval.tokens_per_s,
            f"hit_rate_{name}": hits_of(interval).rate,
            f"lru_hit_rate_{name}": int(found[looks].sum()) / best.choices if best.choices else None,
            f"best_hit_rate_{name}": best.rate,
            f"moved_bytes_per_step_{name}": interval.per_step("residency.moved_bytes"),
        }
    looks = slice(after_it[0].stats.residency.looks, after_it[-1].stats.residency.looks)
    hits = _hits_of_looks(after_it, looks.stop - looks.start)
    good = looks_until_good(hits, found[looks].tolist(), min(GOOD_WINDOW, len(hits)))
    figures["tokens_until_good"] = good
    return figures


def _common(answers: Sequence[TimedAnswer], count: int) -> list[Moment]:
    """Return the first `count` moments of the request that started last: from then on all requests decode."""
    last = max(answers, key=lambda answer: answer.moments[0].time_s)
    return last.moments[:count]


def _hits_of_looks(moments: Sequence[Moment], looks: int) -> list[int]:
    """Return the hits of each look since the first moment; those of looks between two moments are interpolated."""
    at = np.array([moment.stats.residency.looks for moment in moments])
    hits = np.array([moment.stats.residency.hits for moment in moments])
    between = np.diff(np.interp(np.arange(looks + 1) + at[0], at, hits))
    return [round(float(count)) for count in between]
