"""Experts that change places as often as they can, and copies that are slow. Never: tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from engines import Loaded
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.executor import Executor
from proa.hybrid.copies import Copiers, Pairs
from proa.hybrid.model import HybridModel
from proa.hybrid.moves import Moves
from proa.machine.cost.heat import Swap
from proa.native.pool import Pool

DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


class Restless:
    """Replaces Heat: swaps every movable pair of a layer, round-robin. Passes stream the first experts in RAM."""

    heat = np.zeros((64, 64), np.float32)  # of layers and experts; each is as hot as any other

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

    def foreseen(self, layer: int, chosen: NDArray[np.int64], tokens: int) -> NDArray[np.float32]:
        return self.heat[layer, : len(chosen)]

    def swaps_of(
        self, layer: int, heat: object, resident: NDArray[np.bool_], movable: NDArray[np.bool_], most: int,
        threshold: object = None,
    ) -> list[Swap]:  # fmt: skip
        """Promotions of a pass: every movable pair, up to `most`, whatever the threshold."""
        ins, outs = ((side & movable).nonzero()[0].tolist() for side in (~resident, resident))
        return [Swap(layer, promote, evict) for promote, evict in zip(ins, outs, strict=False)][:most]


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


def check_places(hybrid: HybridModel, inclusive: bool, fewest: int | None = None) -> None:
    """Check that the tables map every expert to one side, and at least `fewest` of each layer, or as many as at the
    start, to the GPU."""
    moves = hybrid.moves
    assert moves is not None
    for i, layer in enumerate(hybrid.layers):
        memory, residency = layer.memory, moves.tables.residency[i]
        up, cpu = residency.up.cpu(), residency.cpu.cpu()
        assert ((up != 0) ^ (cpu >= 0)).all()
        assert (up != 0).sum() >= (len(memory.slots.slot_of) if fewest is None else fewest)
        assert len(set(up[up != 0].tolist())) == (up != 0).sum()
        numbers = cpu[cpu >= 0].tolist()
        assert len(set(numbers)) == len(numbers)
        if inclusive:
            assert numbers == [e for e in range(memory.experts) if not up[e]]


class Flight:
    """Up to three steps in flight; named: the addresses in the tables of each, on both sides."""

    def __init__(self, hybrid: HybridModel) -> None:
        self._hybrid = hybrid
        self.named: list[list[range]] = []

    def begin(self) -> None:
        self._hybrid.begin()
        self.named.append([place for memory in self._layers() for place in memory])
        self._hybrid.launched()

    def end(self) -> None:
        self._hybrid.end()
        del self.named[0]

    def writes(self, to: Tensor) -> None:
        for step in self.named:
            assert not any(place.start < to.data_ptr() + to.nbytes and to.data_ptr() < place.stop for place in step)

    def _layers(self) -> Iterator[list[range]]:
        assert self._hybrid.tables is not None
        for layer, residency in zip(self._hybrid.layers, self._hybrid.tables.residency, strict=True):
            shape = layer.memory.shape
            for of, addresses in ((shape.up, residency.up), (shape.down, residency.down)):
                yield [range(at, at + of.matrix_bytes) for at in addresses.tolist() if at]
            for number in residency.cpu[residency.cpu >= 0].tolist():
                yield [
                    range(t.data_ptr(), t.data_ptr() + t.nbytes) for side in layer.memory.in_place(number) for t in side
                ]
