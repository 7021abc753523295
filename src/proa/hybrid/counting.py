"""Counts of the experts that steps choose, and of hits: counted on the device, fetched beside the steps. Never: acting
on the counts.

A fetch during a step has the counts of some of its layers; those of the others come with the next look. Sums stay
exact, and each layer has counts of whole tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from proa.hybrid.copies import Copier, Copy
from proa.hybrid.tables import Tables
from proa.hybrid.trace import MOST_TRACED, TRACE_DTYPE
from proa.models.ranks import CPU

_WAIT_S = 1e-3


@dataclass(frozen=True)
class Seen:
    """Counts since the last look. chosen: [layers, experts of the largest layer]; tokens: in each layer, [layers]."""

    chosen: NDArray[np.int64]
    tokens: NDArray[np.float32]


@dataclass
class Tally:
    """Sums since the start. A hit is a choice of an expert that a GPU holds; bytes count each expert once per look."""

    looks: int = 0
    choices: int = 0
    hits: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0


class Counting:
    """`tables` must count. expert_bytes: of one expert, for each layer. trace: a file that each look is appended to."""

    def __init__(
        self, tables: Tables, top_k: int, expert_bytes: Sequence[int], copier: Copier, trace: Path | None = None
    ) -> None:
        self.tally = Tally()
        self._tables, self._top_k, self._copier = tables, top_k, copier
        self._expert_bytes = np.array(expert_bytes, np.int64)
        self._counted = torch.zeros(tables.counts.shape, dtype=torch.int32, pin_memory=tables.counts.is_cuda)
        self._last = np.zeros(self._counted.shape, np.int32)
        self.totals = np.zeros(self._counted.shape, np.int64)  # how often each expert was chosen so far
        self._copy: Copy | None = None
        self._trace = None if trace is None else trace.open("wb", buffering=0)  # readers see each look at once

    def look(self) -> Seen | None:
        """Return the counts since the last look and start the next fetch; None while a fetch is under way."""
        if self._copy is not None and not self._copy.done():
            return None
        seen = None if self._copy is None else self._take()
        self._copy = self._copier.start([(self._counted, self._tables.counts)])
        return seen

    def unseen(self, layer: int, counts: NDArray[np.int32]) -> NDArray[np.int64]:
        """The layer's choices that no look has returned yet. counts: the device's, of the layer's experts."""
        last = self._last[layer, : len(counts)]
        return (counts - last).astype(np.int64)  # wraps as in `_take`

    def settle(self) -> None:
        """Wait for the fetch and bring `totals` up to date. No step may be under way."""
        while self._copy is not None and not self._copy.done():
            time.sleep(_WAIT_S)
        self._copy = None
        self._counted.copy_(self._tables.counts)
        self._take()

    def close(self) -> None:
        self._copier.close()
        if self._trace is not None:
            self._trace.close()

    def _take(self) -> Seen:
        now = self._counted.numpy().copy()
        chosen = (now - self._last).astype(np.int64)  # int32 wraps as the device's counters do
        self._last = now
        self.totals += chosen
        here = self._tables.owners != CPU
        hits, tally = np.where(here, chosen, 0), self.tally
        tally.looks += 1
        tally.choices += int(chosen.sum())
        tally.hits += int(hits.sum())
        tally.hit_bytes += int(((hits > 0).sum(1) * self._expert_bytes).sum())
        tally.missed_bytes += int((((chosen > 0) & ~here).sum(1) * self._expert_bytes).sum())
        if self._trace is not None:
            self._trace.write(np.minimum(chosen, MOST_TRACED).astype(TRACE_DTYPE).tobytes())
        return Seen(chosen, (chosen.sum(1) / self._top_k).astype(np.float32))
