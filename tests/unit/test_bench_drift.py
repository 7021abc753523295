"""Hits of the best fixed set and of an LRU cache on a small trace, and the windows around a drift, computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from proa.bench.hybrid_ask import TimedAnswer
from proa.bench.hybrid_drift import drift_figures, drift_tokens_each
from proa.bench.hybrid_figures import Moment
from proa.bench.hybrid_hits import best_fixed_set, looks_until_good, lru_hits, read_trace
from proa.engine.stats import ResidencyStats, SchedulerStats, Stats
from proa.hybrid.trace import TRACE_DTYPE

LAYERS, EXPERTS = 2, 9


def random_trace(looks: int, seed: int, top_k: int = 2) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    rng = np.random.default_rng(seed)
    trace = np.zeros((looks, LAYERS, EXPERTS), np.int64)
    for look in trace:
        for row in look:
            row[rng.permutation(EXPERTS)[:top_k]] = rng.integers(1, 4, top_k)
    return trace


@pytest.mark.parametrize("slots", [(3, 5), (0, 9), (1, 1)])
def test_hits_of_the_best_fixed_set_and_an_lru(slots: tuple[int, int]) -> None:
    trace = random_trace(40, sum(slots))
    hits = hit_bytes = missed_bytes = 0
    lru = np.zeros(40, np.int64)
    for layer, (places, nbytes) in enumerate(zip(slots, (10, 1000), strict=True)):
        of = trace[:, layer]
        best = sorted(range(EXPERTS), key=lambda e: -of[:, e].sum())[:places]
        hits += of[:, best].sum()
        hit_bytes += nbytes * (of[:, best] > 0).sum()
        missed_bytes += nbytes * ((of > 0).sum() - (of[:, best] > 0).sum())
        kept: list[int] = []  # the last one first
        for i, row in enumerate(of):
            chosen = np.flatnonzero(row).tolist()
            lru[i] += sum(row[e] for e in chosen if e in kept[:places])
            kept = chosen + [e for e in kept if e not in chosen]
    found = best_fixed_set(trace, slots, (10, 1000))
    assert (found.hits, found.hit_bytes, found.missed_bytes) == (hits, hit_bytes, missed_bytes)
    assert lru_hits(trace, slots).tolist() == lru.tolist()


def test_looks_until_good_compares_windows_with_an_lru() -> None:
    assert looks_until_good([0, 0, 9, 8, 10, 10], [10] * 6, 2) == 5, "8 and 10"
    assert looks_until_good([0, 0, 9, 9, 1, 1], [10] * 6, 2) == 4
    assert looks_until_good([8] * 6, [10] * 6, 2) is None


def answer(first: int, hits: list[int], seconds: float) -> TimedAnswer:
    """An answer with one token per step and look; each look has four selections."""
    at = np.cumsum([0, *hits]).tolist()
    moments = [
        Moment(seconds * i, Stats(SchedulerStats(steps=i, generated_tokens=i), residency=ResidencyStats(
            looks=first + i, choices=4 * i, hits=at[i], moved_bytes=10 * i)))
        for i in range(len(hits) + 1)
    ]  # fmt: skip
    return TimedAnswer([1] * len(moments), moments)


def test_windows_around_a_drift(tmp_path: Path) -> None:
    """One layer with two slots; experts 0 and 1 are selected before the drift, 2 and 3 after. The measured hits are
    half of the possible ones."""
    drift, count = 20, drift_tokens_each(20)
    assert count == 23
    trace = np.zeros((2 * count, 1, EXPERTS), TRACE_DTYPE)
    trace[:count, 0, :2] = trace[count:, 0, 2:4] = 2
    (tmp_path / "trace").write_bytes(trace.tobytes())
    before, after = answer(0, [2] * count, 0.5), answer(count, [0] * 3 + [4] * count, 0.25)
    figures = drift_figures([before], [after], read_trace(tmp_path / "trace", 1, EXPERTS), [2], drift)
    assert (figures["drift_tokens"], figures["window_tokens"]) == (20, 2)
    assert (figures["tokens_per_s_before"], figures["tokens_per_s_at_0"]) == (2, 4)
    assert (figures["hit_rate_before"], figures["hit_rate_at_0"], figures["hit_rate_at_20"]) == (0.5, 0, 1)
    assert (figures["lru_hit_rate_before"], figures["lru_hit_rate_at_0"], figures["lru_hit_rate_at_2"]) == (1, 0.5, 1)
    assert {figures[name] for name in figures if name.startswith("best_hit_rate")} == {1}
    assert figures["moved_bytes_per_step_before"] == 10
    assert figures["tokens_until_good"] == 21, "of looks 1 to 20, 18 hit; all of an LRU's do"
