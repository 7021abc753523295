"""Computes, from a trace of expert selections, the hits of the best fixed set of experts and of an LRU cache.
hybrid/counting.py writes the trace (format: hybrid/trace.py). A look is one count of selections, normally of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proa.hybrid.trace import TRACE_DTYPE

GOOD_SHARE = 0.9  # fraction of an LRU cache's hits that counts as adapted

Trace = NDArray[np.int64]  # [looks, layers, experts]: how often each expert was selected


@dataclass(frozen=True)
class Hits:
    """Selections of experts in VRAM over an interval. Bytes count an expert once per look."""

    choices: float  # (token, expert) pairs, hits or not
    hits: float
    hit_bytes: float
    missed_bytes: float

    @property
    def rate(self) -> float | None:
        """The fraction of pairs whose expert was in VRAM; None if none were counted."""
        return self.hits / self.choices if self.choices else None


def read_trace(file: Path, layers: int, experts: int) -> Trace:
    """Read the whole trace file."""
    return np.fromfile(file, TRACE_DTYPE).reshape(-1, layers, experts).astype(np.int64)


def best_fixed_set(trace: Trace, slots: Sequence[int], expert_bytes: Sequence[int]) -> Hits:
    """Compute the hits with the most selected experts of the whole trace in VRAM, `slots` per layer."""
    order = (-trace.sum(0)).argsort(1, kind="stable")
    kept = np.zeros(order.shape, bool)
    np.put_along_axis(kept, order, np.arange(order.shape[1]) < np.array(slots)[:, None], 1)
    nbytes = np.array(expert_bytes)[:, None]
    pairs, read = trace.sum(0), (trace > 0).sum(0) * nbytes
    return Hits(int(pairs.sum()), int((pairs * kept).sum()), int((read * kept).sum()), int((read * ~kept).sum()))


def lru_hits(trace: Trace, slots: Sequence[int]) -> NDArray[np.int64]:
    """Return the hits [looks] of an LRU cache with `slots` experts per layer, empty at the start."""
    looks, layers, experts = trace.shape
    last = np.full((layers, experts), -1, np.int64)
    found = np.zeros(looks, np.int64)
    places = np.array(slots)[:, None]
    ranks = np.empty_like(last)
    for i, chosen in enumerate(trace):
        np.put_along_axis(ranks, (-last).argsort(1, kind="stable"), np.arange(experts)[None], 1)
        found[i] = chosen[(ranks < places) & (last >= 0)].sum()
        last[chosen > 0] = i
    return found


def looks_until_good(hits: Sequence[int], lru: Sequence[int], window: int) -> int | None:
    """Return after how many looks the hits of the last `window` looks first reach GOOD_SHARE of the LRU cache's; None
    if they never do."""
    ours, theirs = (np.convolve(of, np.ones(window), "valid") for of in (hits, lru))
    good = np.flatnonzero(ours >= GOOD_SHARE * theirs)
    return int(good[0]) + window if len(good) else None
