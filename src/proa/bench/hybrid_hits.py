"""What a trace of chosen experts allows: hits of the best fixed set and of an LRU. Pure arithmetic over what
hybrid/counting.py writes (hybrid/trace.py). Never: clocks, engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proa.hybrid.trace import TRACE_DTYPE

GOOD_SHARE = 0.9  # of an LRU's hits

Trace = NDArray[np.int64]  # [looks, layers, experts]: how often each was chosen


@dataclass(frozen=True)
class Kept:
    """Of a trace, what some experts in VRAM would have been worth. Bytes count an expert once a look."""

    hits: int
    hit_bytes: int
    missed_bytes: int


def read_trace(file: Path, layers: int, experts: int) -> Trace:
    """All looks so far."""
    return np.fromfile(file, TRACE_DTYPE).reshape(-1, layers, experts).astype(np.int64)


def best_kept(trace: Trace, slots: Sequence[int], expert_bytes: Sequence[int]) -> Kept:
    """Of the experts that are chosen most in the whole trace, `slots` of each layer."""
    order = (-trace.sum(0)).argsort(1, kind="stable")
    kept = np.zeros(order.shape, bool)
    np.put_along_axis(kept, order, np.arange(order.shape[1]) < np.array(slots)[:, None], 1)
    nbytes = np.array(expert_bytes)[:, None]
    chosen = (trace > 0).sum(0) * nbytes
    return Kept(int((trace.sum(0) * kept).sum()), int((chosen * kept).sum()), int((chosen * ~kept).sum()))


def lru_hits(trace: Trace, slots: Sequence[int]) -> NDArray[np.int64]:
    """[looks]: choices that are found by who keeps the `slots` of each layer that were chosen last; at first none."""
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
    """After how many looks the hits of the last `window` first reach GOOD_SHARE of an LRU's; None: never."""
    ours, theirs = (np.convolve(of, np.ones(window), "valid") for of in (hits, lru))
    good = np.flatnonzero(ours >= GOOD_SHARE * theirs)
    return int(good[0]) + window if len(good) else None
