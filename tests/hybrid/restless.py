"""Experts that change places as often as they can, and copies that are slow. Never: tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engines import Loaded
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.executor import Executor
from proa.hybrid.copies import Copiers, Pairs
from proa.hybrid.moves import Moves
from proa.machine.cost.heat import Swap
from proa.native.pool import Pool

DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


class Restless:
    """Replaces Heat: swaps every movable pair of a layer, round-robin. Passes stream the first experts in RAM."""

    heat = None

    def __init__(self) -> None:
        self.call = 0

    def observe(self, chosen: object, tokens: float, resident: object) -> None:
        pass

    def swaps(self, resident: Tensor, movable: Tensor) -> list[Swap]:
        self.call += 1
        found = []
        for layer, (inside, may) in enumerate(zip(resident, movable, strict=True)):
            ins, outs = ([int(e) for e in (side & may).nonzero()[0]] for side in (~inside, inside))
            if ins and outs:
                found.append(Swap(layer, ins[self.call % len(ins)], outs[self.call // 2 % len(outs)]))
        return found


@dataclass
class Moving:
    """A split model whose experts move all the time."""

    loaded: Loaded
    kept: list[Kept]

    @property
    def moves(self) -> Moves:
        moves = self.kept[-1].hybrid.moves
        assert moves is not None
        return moves


def restless(folder: Path, pool: Pool, split: Split, device: str, copiers: Copiers, **override: object) -> Moving:
    kept: list[Kept] = []
    loaded = load_split(folder, pool, split, device, lambda: copiers, kept, **override)

    def make(*sizes: object) -> Executor[Any]:
        executor = loaded.make(*sizes)
        made.moves.heat = Restless()
        return executor

    made = Moving(Loaded(loaded.spec, make), kept)
    return made


@dataclass
class SlowCopy:
    """A copy that arrives at the `asks`-th call of done(); until then its target is full of NaN."""

    pairs: Pairs
    asks: int

    def __post_init__(self) -> None:
        for to, _ in self.pairs:
            to.fill_(0xFF)

    def done(self) -> bool:
        self.asks -= 1
        if self.asks == 0:
            for to, source in self.pairs:
                to.copy_(source)
        return self.asks <= 0


@dataclass
class SlowCopier:
    asks: int
    started: list[SlowCopy] = field(default_factory=list)

    def start(self, pairs: Pairs) -> SlowCopy:
        self.started.append(SlowCopy(pairs, self.asks))
        return self.started[-1]

    def close(self) -> None:
        pass


class PromptCopier:
    """A copier whose copies arrive at once."""

    def start(self, pairs: Pairs) -> SlowCopy:
        return SlowCopy(pairs, 1)

    def close(self) -> None:
        pass
