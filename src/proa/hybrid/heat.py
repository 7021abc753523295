"""How hot each expert is, and which should change places: pure arithmetic over counts. Never: memory, devices, tokens.

Heat is how often an expert was chosen, halved every HALF_LIFE_TOKENS: of one that a share p of the tokens choose it is
about p * WINDOW_TOKENS. Heats of two experts that are chosen equally often differ by the root of their sum, so a swap
has to promise more than such chance does, and more reads than the transfer itself costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIFE_TOKENS = 32
WINDOW_TOKENS = HALF_LIFE_TOKENS / math.log(2)
MOST_STEP_TOKENS = 64  # a step of more, a prompt's, counts as so many: it seeds, but does not rule
LEAST_GAIN = 2.0  # reads by the CPU in the next window that a swap saves
CHANCE = 1.25  # standard deviations of the difference of two equal experts

Counts = NDArray[np.int64]
Heats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Swap:
    """In MoE layer `layer`, `promote` takes the place of `evict` on the GPU."""

    layer: int
    promote: int
    evict: int


class Heat:
    """Of `experts` experts (the most that a layer has) in each of `layers` layers; at first all are cold."""

    def __init__(self, layers: int, experts: int) -> None:
        self.heat: Heats = np.zeros((layers, experts), np.float32)

    def observe(self, chosen: Counts, tokens: float) -> None:
        """chosen [layers, experts]: how often each was, by `tokens` tokens."""
        if tokens <= 0:
            return
        counted = min(tokens, MOST_STEP_TOKENS)
        self.heat *= np.float32(0.5 ** (counted / HALF_LIFE_TOKENS))
        self.heat += chosen * np.float32(counted / tokens)

    def swaps(self, resident: Flags, movable: Flags) -> list[Swap]:
        """At most one of each layer, what gains most first. Both bool [layers, experts]; others stay where they are."""
        heat = self.heat
        outside = np.where(~resident & movable, heat, -np.inf)
        inside = np.where(resident & movable, heat, np.inf)
        rows = np.arange(len(heat))
        hottest, coldest = outside.argmax(1), inside.argmin(1)
        hot, cold = outside[rows, hottest], inside[rows, coldest]
        possible = np.isfinite(hot) & np.isfinite(cold)
        hot, cold = np.where(possible, hot, 0.0), np.where(possible, cold, 0.0)
        gain = hot - cold
        worth = possible & (gain > LEAST_GAIN + CHANCE * np.sqrt(hot + cold))
        order = np.argsort(-gain, kind="stable")
        return [Swap(int(i), int(hottest[i]), int(coldest[i])) for i in order if worth[i]]
