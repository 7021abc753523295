"""Moving experts give the same bits as static ones: a second engine has each step's experts where the tables of the
first one had them, from copies that were made before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines import Loaded
from hybrid.restless import DEVICES, restless
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.executor import Executor
from proa.hybrid.copies import Copier, Copiers, Copy, GpuCopier, HostCopier, Pairs
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.model import HybridModel
from proa.hybrid.slots import Slot
from proa.native.pool import Pool
from teacher_forced import all_experts, forced, prompts
from tiny import make_tiny

AHEAD_BYTES = 128 << 20  # copied before each expert, so that its copy overlaps steps
SIM_BYTES_PER_S = 1.5e6
LENGTHS, PROMPTS = [60, 45], [5, 3]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


class BusyCopier(GpuCopier):
    """Delays each copy by a long one before it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        source = torch.zeros(AHEAD_BYTES, dtype=torch.uint8, pin_memory=True)
        self._ahead = torch.empty(AHEAD_BYTES, dtype=torch.uint8, device=device), source

    def start(self, pairs: Pairs) -> Copy:
        return super().start([self._ahead, *pairs])


@dataclass
class Patient:
    """Copies that arrive at the third call of done(), however fast they were."""

    copier: Copier

    def start(self, pairs: Pairs) -> Copy:
        return Late(self.copier.start(pairs))

    def close(self) -> None:
        self.copier.close()


@dataclass
class Late:
    copy: Copy
    asks: int = 3

    def done(self) -> bool:
        self.asks -= 1
        while self.asks <= 0 and not self.copy.done():
            time.sleep(0.0001)
        return self.asks <= 0


def copiers(device: str) -> Copiers:
    if device == "cuda":
        at = torch.device("cuda:0")
        return Copiers(Patient(BusyCopier(at)), GpuCopier(at))
    return Copiers(Patient(HostCopier(SIM_BYTES_PER_S)), HostCopier())


@dataclass
class Step:
    """The tables at the start of a step, [layers, experts]."""

    on_gpu: np.ndarray
    numbers: np.ndarray  # int32: number in RAM
    copies_underway: int


def recorded(hybrid: HybridModel, steps: list[Step]) -> None:
    """Append the tables of each step to `steps`."""
    begin, tables, moves = hybrid.begin, hybrid.tables, hybrid.moves
    assert tables is not None
    assert moves is not None

    def wrapped() -> None:
        begin()
        underway = sum(move.copy is not None for move in moves._moves)
        steps.append(Step(tables._addresses[:, 0] != 0, tables._numbers.copy(), underway))

    hybrid.begin = wrapped  # type: ignore[method-assign]


Bytes = tuple[Tensor, Tensor]  # packed: (gate and up, down)


@dataclass
class Still:
    """An engine whose experts are where a recording had them; nothing is copied beside a step."""

    hybrid: HybridModel
    steps: list[Step]
    taken: int = 0
    own: list[list[Bytes]] = field(default_factory=list)  # [layers][experts], on the host
    slots: list[list[Slot]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in (layer.memory for layer in self.hybrid.layers):
            self.own.append([_bytes_of(layer, expert) for expert in range(layer.experts)])
            device = layer.slots.up.device
            self.slots.append([Slot(*(part.clone().to(device) for part in own)) for own in self.own[-1]])
        begin = self.hybrid.begin

        def wrapped() -> None:
            self._arrange(self.steps[self.taken])
            self.taken += 1
            begin()

        self.hybrid.begin = wrapped  # type: ignore[method-assign]

    def _arrange(self, step: Step) -> None:
        tables = self.hybrid.tables
        assert tables is not None
        for i, layer in enumerate(layer.memory for layer in self.hybrid.layers):
            for expert in range(layer.experts):
                if step.on_gpu[i, expert]:
                    tables.to_gpu(i, expert, self.slots[i][expert])
                    continue
                number = int(step.numbers[i, expert])
                for part, spans in zip(self.own[i][expert], layer.in_place(number), strict=True):
                    (span,) = spans  # there is one memory node
                    span.copy_(part.view(-1))
                tables.to_cpu(i, expert, number)


def _bytes_of(layer: LayerMemory, expert: int) -> Bytes:
    slot = layer.slots.slot(0)
    if expert in layer.number_of:
        (up,), (down,) = layer.in_place(layer.number_of[expert])
        return up.clone().view(slot.up.shape), down.clone().view(slot.down.shape)
    slot = layer.slots.slot(layer.slots.slot_of[expert])
    return slot.up.cpu().clone(), slot.down.cpu().clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_moving_experts_give_the_bits_of_static_ones(
    name: str, inclusive: bool, device: str, pool: Pool, tmp_path: Path
) -> None:
    folder = make_tiny(name, tmp_path)
    override, texts = all_experts(folder), prompts(LENGTHS)
    split = Split(0.5, inclusive, spare=2)
    steps: list[Step] = []
    moving = restless(folder, pool, split, device, copiers(device), **override)

    def make_moving(*sizes: object) -> Executor[Any]:
        executor = moving.loaded.make(*sizes)
        recorded(moving.kept[-1].hybrid, steps)
        return executor

    got = forced(Loaded(moving.loaded.spec, make_moving), texts, PROMPTS)
    kept: list[Kept] = []
    static = load_split(folder, pool, Split(0.5, inclusive), device, keep=kept, **override)
    stills: list[Still] = []

    def make_still(*sizes: object) -> Executor[Any]:
        executor = static.make(*sizes)
        stills.append(Still(kept[-1].hybrid, steps))
        return executor

    want = forced(Loaded(static.spec, make_still), texts, PROMPTS)
    assert stills[0].taken == len(steps)
    assert want.isfinite().all()
    assert torch.equal(got, want)
    assert moving.moves.moved.experts > 12
    assert sum(step.copies_underway > 0 for step in steps) > len(steps) // 2, "steps run beside copies"
    changes = sum((a.on_gpu != b.on_gpu).any() for a, b in pairwise(steps))
    assert changes > 4
    moving.kept[-1].close()
