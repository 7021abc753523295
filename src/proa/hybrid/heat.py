"""The heat of each expert, and which experts should swap places: pure arithmetic over counts. Never: memory, devices.

Heat counts how often an expert was chosen, with a half-life in tokens: an expert that a share p of the tokens choose
has a heat of about p * half-life / ln 2. The heats of two experts that are chosen equally often differ by about the
root of their sum, so a swap must gain more than this noise, and more reads than the transfer itself costs.

The best half-life depends on how fast routing changes, which is unknown beforehand: there is a heat for each of
HALF_LIVES_TOKENS. Each has a top set, its hottest experts, as many as are on the GPU, and is scored by the share of the
next choices that fall into it; the heat with the best score decides. The experts on the GPU are scored alike: the
larger the gap between both scores, the less a swap needs to gain. If all experts are equally hot there is no gap, the
threshold stays high, and noise moves few experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIVES_TOKENS = (16, 32, 128, 512)
JUDGED_TOKENS = 64  # half-life of the scores
MOST_HALF_LIVES = 2  # a longer step, of a prompt, counts as so many half-lives: it seeds heat without dominating it
FEW_TOKENS = 4  # steps of up to so many tokens hardly change top sets
LARGE_GAP = 0.02  # between the scores of the best heat and of the experts on the GPU: EAGER from here on


@dataclass(frozen=True)
class Promise:
    """Threshold of a swap. least_gain: reads that the CPU saves in about the next half-life; chance: on top of it,
    standard deviations of the heat difference of two equally hot experts."""

    least_gain: float
    chance: float


STRICT, EAGER = Promise(2.0, 1.25), Promise(1.0, 0.5)  # without a gap; from LARGE_GAP on

Counts = NDArray[np.int64]
Heats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Tokens = NDArray[np.float32]


@dataclass(frozen=True)
class Swap:
    """In MoE layer `layer`, `promote` takes the place of `evict` on the GPU."""

    layer: int
    promote: int
    evict: int


class Heat:
    """experts: of the largest layer. slots: how many experts of each layer are on the GPU. All heats start at 0."""

    def __init__(self, experts: int, slots: Sequence[int]) -> None:
        count = len(HALF_LIVES_TOKENS)
        self._heats = [np.zeros((len(slots), experts), np.float32) for _ in range(count)]
        self._slots = np.array(slots, np.int64)[:, None]
        self._top = np.zeros((count, len(slots), experts), np.float32)  # 1: in the top set of each heat
        self._scores = np.zeros(count)  # decayed share of choices that fell into each heat's top set
        self._resident_score = 0.0  # and into the experts on the GPU
        self._next = 0  # round-robin index of the heat to re-rank next

    @property
    def ruling(self) -> int:
        """Index of the half-life with the best score; of equals the longest, which is the least noisy."""
        return int(len(self._scores) - 1 - self._scores[::-1].argmax())

    @property
    def heat(self) -> Heats:
        return self._heats[self.ruling]

    @property
    def promise(self) -> Promise:
        """The present threshold of a swap: between STRICT and EAGER, by the gap of the scores."""
        eager = min(1.0, max(0.0, (self._scores[self.ruling] - self._resident_score) / LARGE_GAP))
        return Promise(
            STRICT.least_gain + eager * (EAGER.least_gain - STRICT.least_gain),
            STRICT.chance + eager * (EAGER.chance - STRICT.chance),
        )

    def observe(self, chosen: Counts, tokens: Tokens | float, resident: Flags) -> None:
        """Update heats and scores. chosen [layers, experts]: choices by `tokens` tokens, a number or [layers], since a
        look may see only some layers of a prompt in turns. resident, shaped like `chosen`: experts on the GPU."""
        each = np.broadcast_to(np.asarray(tokens, np.float32), len(chosen))
        if not each.any():
            return
        of_each = np.divide(1, each, out=np.zeros(len(each), np.float32), where=each > 0)
        judged = np.minimum(each, JUDGED_TOKENS)
        faded = 0.5 ** (float(judged.mean()) / JUDGED_TOKENS)
        often = chosen.astype(np.float32)
        fair = often * (judged * of_each)[:, None]  # tokens of a layer capped, so that no layer dominates
        found = self._top.reshape(len(self._heats), -1) @ fair.ravel()
        of_one = (1 - faded) / max(1.0, float(fair.sum()))
        self._scores = faded * self._scores + of_one * found
        self._resident_score = faded * self._resident_score + of_one * float(fair[resident].sum())
        for heat, half_life in zip(self._heats, HALF_LIVES_TOKENS, strict=True):
            counted = np.minimum(each, MOST_HALF_LIVES * half_life)
            heat *= (0.5 ** (counted / half_life))[:, None]
            heat += often * (counted * of_each)[:, None]
        if each.mean() > FEW_TOKENS or not self._top.any():
            for which in range(len(self._heats)):
                self._rank(which)
        else:  # one at a time: sorting dominates the cost
            self._rank(self._next)
            self._next = (self._next + 1) % len(self._heats)

    def _rank(self, which: int) -> None:
        heat = self._heats[which]
        experts = heat.shape[1]
        least = np.take_along_axis(np.sort(heat, 1), np.minimum(experts - self._slots, experts - 1), 1)
        self._top[which] = (heat >= least) & (heat > 0) & (self._slots > 0)

    def swaps(self, resident: Flags, movable: Flags) -> list[Swap]:
        """Return at most one swap per layer, largest gain first. resident, movable: bool [layers, experts]; an expert
        that is not movable stays."""
        heat, promise = self.heat, self.promise
        outside = np.where(~resident & movable, heat, -np.inf)
        inside = np.where(resident & movable, heat, np.inf)
        rows = np.arange(len(heat))
        hottest, coldest = outside.argmax(1), inside.argmin(1)
        hot, cold = outside[rows, hottest], inside[rows, coldest]
        possible = np.isfinite(hot) & np.isfinite(cold)
        hot, cold = np.where(possible, hot, 0.0), np.where(possible, cold, 0.0)
        gain = hot - cold
        worth = possible & (gain > promise.least_gain + promise.chance * np.sqrt(hot + cold))
        order = np.argsort(-gain, kind="stable")
        return [Swap(int(i), int(hottest[i]), int(coldest[i])) for i in order if worth[i]]
