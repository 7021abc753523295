"""How hot each expert is, and which should change places: pure arithmetic over counts. Never: memory, devices, tokens.

Heat is how often an expert was chosen, halved every so many tokens: of one that a share p of the tokens choose it is
about p * half-life / ln 2. Heats of two experts that are chosen equally often differ by the root of their sum, so a
swap has to promise more than such chance does, and more reads than the transfer itself costs.

How long heat should last depends on how soon favourites change, which nobody knows beforehand: there is a heat for each
of HALF_LIVES_TOKENS. Each says which experts it would keep, and is judged by what is chosen next; the best one rules.
So are those who are on the GPU: as far as the best heat's experts would have been chosen more often, a swap needs to
promise less. Where nobody is hotter in truth they are chosen equally often, and chance moves little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIVES_TOKENS = (16, 32, 128, 512)
JUDGED_TOKENS = 64  # half-life of what the heats are judged by
MOST_HALF_LIVES = 2  # a step of more tokens, a prompt's, counts as so many: it seeds, but does not rule
FEW_TOKENS = 4  # of a step: what heats would keep hardly changes with it
LARGE_GAP = 0.02  # of choices, between the best heat's experts and those on the GPU


@dataclass(frozen=True)
class Promise:
    """Of a swap. least_gain: reads by the CPU in the next half-life or so that it saves; chance: standard deviations of
    the difference of two equal experts."""

    least_gain: float
    chance: float


STRICT, EAGER = Promise(2.0, 1.25), Promise(1.0, 0.5)  # without a gap; with a large one

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
    """Of `experts` experts (the most that a layer has) in layers that have `slots` of them on the GPU, each its own
    number; at first all are cold."""

    def __init__(self, experts: int, slots: Sequence[int]) -> None:
        count = len(HALF_LIVES_TOKENS)
        self._heats = [np.zeros((len(slots), experts), np.float32) for _ in range(count)]
        self._slots = np.array(slots, np.int64)[:, None]
        self._kept = np.zeros((count, len(slots), experts), np.float32)  # 1: whom each heat would have on the GPU
        self._scores = np.zeros(count)  # shares of the last choices that these were
        self._score = 0.0  # the same of those on the GPU
        self._next = 0  # whose turn it is to say whom it would keep

    @property
    def ruling(self) -> int:
        """Which of the half-lives; of equals the longest, which chance moves least."""
        return int(len(self._scores) - 1 - self._scores[::-1].argmax())

    @property
    def heat(self) -> Heats:
        return self._heats[self.ruling]

    @property
    def promise(self) -> Promise:
        """What a swap has to promise now."""
        eager = min(1.0, max(0.0, (self._scores[self.ruling] - self._score) / LARGE_GAP))
        return Promise(
            STRICT.least_gain + eager * (EAGER.least_gain - STRICT.least_gain),
            STRICT.chance + eager * (EAGER.chance - STRICT.chance),
        )

    def observe(self, chosen: Counts, tokens: Tokens | float, resident: Flags) -> None:
        """chosen [layers, experts]: how often each was, by `tokens` tokens [layers], or as many of every layer: a look
        may find some layers of a prompt that takes turns. resident, as `chosen`: who was on the GPU."""
        each = np.broadcast_to(np.asarray(tokens, np.float32), len(chosen))
        if not each.any():
            return
        of_each = np.divide(1, each, out=np.zeros(len(each), np.float32), where=each > 0)
        judged = np.minimum(each, JUDGED_TOKENS)
        faded = 0.5 ** (float(judged.mean()) / JUDGED_TOKENS)
        often = chosen.astype(np.float32)
        fair = often * (judged * of_each)[:, None]  # no layer counts for much more than others
        found = self._kept.reshape(len(self._heats), -1) @ fair.ravel()
        of_one = (1 - faded) / max(1.0, float(fair.sum()))
        self._scores = faded * self._scores + of_one * found
        self._score = faded * self._score + of_one * float(fair[resident].sum())
        for heat, half_life in zip(self._heats, HALF_LIVES_TOKENS, strict=True):
            counted = np.minimum(each, MOST_HALF_LIVES * half_life)
            heat *= (0.5 ** (counted / half_life))[:, None]
            heat += often * (counted * of_each)[:, None]
        if each.mean() > FEW_TOKENS or not self._kept.any():
            for which in range(len(self._heats)):
                self._keep(which)
        else:  # one at a time: sorting is most of what this costs
            self._keep(self._next)
            self._next = (self._next + 1) % len(self._heats)

    def _keep(self, which: int) -> None:
        heat = self._heats[which]
        experts = heat.shape[1]
        least = np.take_along_axis(np.sort(heat, 1), np.minimum(experts - self._slots, experts - 1), 1)
        self._kept[which] = (heat >= least) & (heat > 0) & (self._slots > 0)

    def swaps(self, resident: Flags, movable: Flags) -> list[Swap]:
        """At most one of each layer, what gains most first. Both bool [layers, experts]; others stay where they are."""
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
