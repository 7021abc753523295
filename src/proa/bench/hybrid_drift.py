"""The arithmetic of `proa bench hybrid --router drift`: before, right after, and once all has settled. Never: clocks,
engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proa.bench.hybrid_ask import Answer
from proa.bench.hybrid_figures import Moment, Span, hit_rate
from proa.bench.hybrid_hits import Trace, best_kept, looks_until_good, lru_hits

WINDOWS = 10  # of the time until all should have settled
GOOD_WINDOW = 20  # looks over which hits are compared with an LRU's


def drift_span(drift_tokens: int) -> int:
    """Tokens that each request needs before the drift, and as many after it: the last window comes when all should have
    settled."""
    return drift_tokens + _window(drift_tokens) + 1


def _window(drift_tokens: int) -> int:
    return drift_tokens // WINDOWS


def drift_figures(
    before: Sequence[Answer], after: Sequence[Answer], trace: Trace, slots: Sequence[int], drift_tokens: int
) -> dict[str, float | None]:
    """Of the same requests before and after the drift; trace: whole, of the engine's time so far. Windows are named by
    how many tokens of each request came since the drift. tokens_until_good: the last hits reach 90 % of an LRU's.
    """
    window, found = _window(drift_tokens), lru_hits(trace, slots)
    before_it, after_it = (_common(of, drift_span(drift_tokens)) for of in (before, after))
    figures: dict[str, float | None] = {"drift_tokens": drift_tokens, "window_tokens": window}
    spans = {"before": Span(before_it[-1 - window], before_it[-1])}
    spans |= {f"at_{i}": Span(after_it[i], after_it[i + window]) for i in range(0, drift_tokens + 1, window)}
    for name, span in spans.items():
        looks = slice(span.begin.stats.expert_looks, span.end.stats.expert_looks)
        choices = int(trace[looks].sum())
        best = best_kept(trace[looks], slots, [0] * len(slots)).hits
        figures |= {
            f"tokens_per_s_{name}": span.tokens_per_s,
            f"hit_rate_{name}": hit_rate(span),
            f"lru_hit_rate_{name}": int(found[looks].sum()) / choices if choices else None,
            f"best_hit_rate_{name}": best / choices if choices else None,
            f"moved_bytes_per_step_{name}": span.per_step("expert_moved_bytes"),
        }
    looks = slice(after_it[0].stats.expert_looks, after_it[-1].stats.expert_looks)
    hits = _hits_of_looks(after_it, looks.stop - looks.start)
    good = looks_until_good(hits, found[looks].tolist(), min(GOOD_WINDOW, len(hits)))
    figures["tokens_until_good"] = good
    return figures


def _common(answers: Sequence[Answer], count: int) -> list[Moment]:
    """The first `count` moments of the request that was the last to begin: all take part in them."""
    last = max(answers, key=lambda answer: answer.moments[0].time_s)
    return last.moments[:count]


def _hits_of_looks(moments: Sequence[Moment], looks: int) -> list[int]:
    """Hits by look since the first moment; of looks that fell between two moments, shared out evenly."""
    at = np.array([moment.stats.expert_looks for moment in moments])
    hits = np.array([moment.stats.expert_hits for moment in moments])
    between = np.diff(np.interp(np.arange(looks + 1) + at[0], at, hits))
    return [round(float(count)) for count in between]
