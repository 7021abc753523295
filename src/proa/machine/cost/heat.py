"""The heat of each expert, and which experts should swap places between GPU and RAM.

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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

HALF_LIVES_TOKENS = (16, 32, 128, 512)
SCORE_HALF_LIFE_TOKENS = 64  # half-life of the scores
MOST_HALF_LIVES = 2  # a longer step, of a prompt, counts as so many half-lives: it seeds heat without dominating it
FEW_TOKENS = 4  # steps of up to so many tokens hardly change top sets
LARGE_GAP = 0.02  # between the scores of the best heat and of the experts on the GPU: EAGER from here on


@dataclass(frozen=True)
class SwapThreshold:
    """A swap must gain more than this. least_gain: reads that the CPU saves in about the next half-life; noise: on top
    of it, standard deviations of the heat difference of two equally hot experts."""

    least_gain: float
    noise: float


STRICT, EAGER = SwapThreshold(2.0, 1.25), SwapThreshold(1.0, 0.5)  # without a gap; from LARGE_GAP on
# Hardly ever exceeded by chance: of 64 to 256 experts that 16 to 4096 tokens choose alike, the hottest in RAM and the
# coldest on the GPU are 1.3 to 3.6 standard deviations apart on average (1080 simulated layers: 7 such swaps).
SURE = SwapThreshold(2.0, 4.0)

Counts = NDArray[np.int64]
Heats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Tokens = NDArray[np.float32]
Size = TypeVar("Size", bound=Hashable)


@dataclass(frozen=True)
class Swap:
    """In MoE layer `layer`, `promote` takes the place of `evict` on the GPU."""

    layer: int
    promote: int
    evict: int


def swap_threshold(best_score: float, resident_score: float) -> SwapThreshold:
    """Between STRICT and EAGER, by the gap between the score of the best heat and that of the experts on the GPU."""
    eager = min(1.0, max(0.0, (best_score - resident_score) / LARGE_GAP))
    return SwapThreshold(
        STRICT.least_gain + eager * (EAGER.least_gain - STRICT.least_gain),
        STRICT.noise + eager * (EAGER.noise - STRICT.noise),
    )


def choose_swaps(heat: Heats, resident: Flags, movable: Flags, threshold: SwapThreshold) -> list[Swap]:
    """At most one swap per layer, largest gain first: the hottest movable expert in RAM for the coldest on the GPU.

    All arrays: [layers, experts]. resident: on the GPU. An expert that is not movable stays.
    """
    outside = np.where(~resident & movable, heat, -np.inf)
    inside = np.where(resident & movable, heat, np.inf)
    rows = np.arange(len(heat))
    hottest, coldest = outside.argmax(1), inside.argmin(1)
    hot, cold = outside[rows, hottest], inside[rows, coldest]
    possible = np.isfinite(hot) & np.isfinite(cold)
    hot, cold = np.where(possible, hot, 0.0), np.where(possible, cold, 0.0)
    worth = possible & _is_worth(hot, cold, threshold)
    order = np.argsort(cold - hot, kind="stable")
    return [Swap(int(i), int(hottest[i]), int(coldest[i])) for i in order if worth[i]]


def _is_worth(hot: Heats, cold: Heats, threshold: SwapThreshold) -> Flags:
    """Whether experts of these heats should swap places."""
    found: Flags = hot - cold > threshold.least_gain + threshold.noise * np.sqrt(hot + cold)
    return found


def swaps_with_room(swaps: Sequence[Swap], sizes: Sequence[Size], spare: Mapping[Size, int]) -> list[Swap]:
    """The first of `swaps` for which there are spare slots. sizes: of each layer's experts; spare: slots by size."""
    left, found = dict(spare), []
    for swap in swaps:
        size = sizes[swap.layer]
        if left.get(size, 0):
            left[size] -= 1
            found.append(swap)
    return found


def choose_arrivals(
    heat: Heats, resident: Flags, movable: Flags, counts: Sequence[int], most: int
) -> list[tuple[int, int]]:  # fmt: skip
    """Up to `most` movable experts in RAM, (layer, expert), that get an additional slot each: one after another the
    hottest of the layer with the least share of its experts on the GPU, so that layers stay alike. counts: experts of
    each layer. Arrays: see choose_swaps."""
    outside = np.where(~resident & movable, heat, -np.inf)
    share, found = resident.sum(1) / np.array(counts), list[tuple[int, int]]()
    for _ in range(most):
        possible = np.where(np.isfinite(outside).any(1), share, np.inf)
        layer = int(possible.argmin())
        if not np.isfinite(possible[layer]):
            break
        expert = int(outside[layer].argmax())
        outside[layer, expert] = -np.inf
        share[layer] += 1 / counts[layer]
        found.append((layer, expert))
    return found


def coldest(heat: Heats, among: Flags, most: int) -> list[tuple[int, int]]:
    """Up to `most` of the flagged experts, (layer, expert), coldest first. Arrays: [layers, experts]."""
    flags = np.argwhere(among)
    order = np.argsort(heat[among], kind="stable")[:most]
    return [(int(layer), int(expert)) for layer, expert in flags[order]]


class Heat:
    """The heats of a model's experts. experts: of the largest layer. slots: experts of each layer on the GPU. All heats
    start at 0."""

    def __init__(self, experts: int, slots: Sequence[int]) -> None:
        count = len(HALF_LIVES_TOKENS)
        self._heats = [np.zeros((len(slots), experts), np.float32) for _ in range(count)]
        self._slots = np.array(slots, np.int64)[:, None]
        self._top = np.zeros((count, len(slots), experts), np.float32)  # 1: in the top set of each heat
        self._scores = np.zeros(count)  # decayed share of choices that fell into each heat's top set
        self._resident_score = 0.0  # and into the experts on the GPU
        self._next = 0  # round-robin index of the heat whose top set is updated next

    def resize(self, slots: Sequence[int]) -> None:
        """Set the number of experts of each layer on the GPU."""
        self._slots = np.array(slots, np.int64)[:, None]

    @property
    def best_half_life(self) -> int:
        """Index of the half-life with the best score; of equals the longest, which is the least noisy."""
        return int(len(self._scores) - 1 - self._scores[::-1].argmax())

    @property
    def heat(self) -> Heats:
        """The heat by the best half-life, [layers, experts]."""
        return self._heats[self.best_half_life]

    @property
    def threshold(self) -> SwapThreshold:
        return swap_threshold(self._scores[self.best_half_life], self._resident_score)

    def observe(self, chosen: Counts, tokens: Tokens | float, resident: Flags) -> None:
        """Update heats and scores. chosen [layers, experts]: choices by `tokens` tokens, a number or [layers], since a
        look may see only some layers of a prompt in turns. resident, shaped like `chosen`: experts on the GPU."""
        each = np.broadcast_to(np.asarray(tokens, np.float32), len(chosen))
        if not each.any():
            return
        per_token = np.divide(1, each, out=np.zeros(len(each), np.float32), where=each > 0)
        scored = np.minimum(each, SCORE_HALF_LIFE_TOKENS)
        kept = 0.5 ** (float(scored.mean()) / SCORE_HALF_LIFE_TOKENS)
        counts = chosen.astype(np.float32)
        capped = counts * (scored * per_token)[:, None]  # tokens of a layer capped, so that no layer dominates
        found = self._top.reshape(len(self._heats), -1) @ capped.ravel()
        weight = (1 - kept) / max(1.0, float(capped.sum()))
        self._scores = kept * self._scores + weight * found
        self._resident_score = kept * self._resident_score + weight * float(capped[resident].sum())
        for heat, half_life in zip(self._heats, HALF_LIVES_TOKENS, strict=True):
            counted = np.minimum(each, MOST_HALF_LIVES * half_life)
            heat *= (0.5 ** (counted / half_life))[:, None]
            heat += counts * (counted * per_token)[:, None]
        if each.mean() > FEW_TOKENS or not self._top.any():
            for which in range(len(self._heats)):
                self._update_top_set(which)
        else:  # one at a time: sorting dominates the cost
            self._update_top_set(self._next)
            self._next = (self._next + 1) % len(self._heats)

    def _update_top_set(self, which: int) -> None:
        heat = self._heats[which]
        experts = heat.shape[1]
        least = np.take_along_axis(np.sort(heat, 1), np.minimum(experts - self._slots, experts - 1), 1)
        self._top[which] = (heat >= least) & (heat > 0) & (self._slots > 0)

    def swaps(self, resident: Flags, movable: Flags) -> list[Swap]:
        """See `choose_swaps`, by the best half-life and the present threshold."""
        return choose_swaps(self.heat, resident, movable, self.threshold)

    def foreseen(self, layer: int, chosen: NDArray[np.int64], tokens: int) -> Heats:
        """The heat that the layer's experts will have after `observe` of this choice, by the best half-life. chosen: of
        each expert, by `tokens` tokens."""
        half_life = HALF_LIVES_TOKENS[self.best_half_life]
        counted = min(tokens, MOST_HALF_LIVES * half_life)
        kept: Heats = self.heat[layer, : len(chosen)] * np.float32(0.5 ** (counted / half_life))
        return kept + chosen.astype(np.float32) * np.float32(counted / tokens)

    def swaps_of(
        self, layer: int, heat: Heats, resident: Flags, movable: Flags, most: int,
        threshold: SwapThreshold | None = None,
    ) -> list[Swap]:  # fmt: skip
        """Up to `most` swaps of one layer, by this heat of its experts and the present threshold, unless one is given.
        Arrays: [experts].

        The swaps that `choose_swaps` finds one after another: an expert that was swapped never swaps again."""
        outside, inside = (~resident & movable).nonzero()[0], (resident & movable).nonzero()[0]
        hottest = outside[np.argsort(-heat[outside], kind="stable")][:most]
        coldest = inside[np.argsort(heat[inside], kind="stable")][:most]
        count = min(len(hottest), len(coldest))
        worth = _is_worth(heat[hottest[:count]], heat[coldest[:count]], threshold or self.threshold)
        count = count if worth.all() else int(worth.argmin())
        return [Swap(layer, int(promote), int(evict)) for promote, evict in zip(hottest[:count], coldest, strict=False)]
