"""Idle KV pages hold experts: each expert stays on one side, and no launch reads what is being written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid.restless import Flight, PromptCopier, Restless, SlowCopy, check_places
from hybrid_engines import Kept, Split, load_split
from proa.hybrid.copies import Copiers, Pairs
from proa.hybrid.loans import slot_in
from proa.hybrid.model import HybridModel, Placement
from proa.models.spec import Model
from proa.native.pool import Pool
from teacher_forced import LIMITS, PAGES
from tiny import make_tiny

LOTS, ROOMS = 3, 3


class RestlessHeat(Restless):
    """All experts are equally hot, and swap all the time."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.heat = np.zeros(shape, np.float32)
        self.sizes: Sequence[int] = ()

    def resize(self, slots: Sequence[int]) -> None:
        self.sizes = slots


class Cleared:
    """Zeros that arrive at the second call of done(); until then the memory is full of NaN."""

    def __init__(self, memories: Sequence[Tensor]) -> None:
        self._memories, self._asked = memories, 0
        for memory in memories:
            memory.fill_(0xFF)

    def done(self) -> bool:
        self._asked += 1
        if self._asked == 2:
            for memory in self._memories:
                memory.zero_()
        return self._asked >= 2


@dataclass
class WatchedCopier:
    """Copies that arrive late; asserts that none writes what a launch in flight may read: what its tables name, and
    pages that were free only after it."""

    flight: Flight | None = None
    pages: list[list[Tensor]] = field(default_factory=list)  # of each launch in flight: rooms that it may use as KV
    fetched: int = 0

    def start(self, pairs: Pairs) -> SlowCopy:
        self.check([to for to, _ in pairs])
        self.fetched += 1
        return SlowCopy(pairs, 2)

    def clear(self, memories: Sequence[Tensor]) -> Cleared:
        self.check(memories)
        return Cleared(memories)

    def check(self, written: Sequence[Tensor]) -> None:
        assert self.flight is not None
        for to in written:
            self.flight.writes(to)
            assert not any(overlap(to, page) for pages in self.pages for page in pages)

    def close(self) -> None:
        pass


def overlap(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
    )  # fmt: skip


@dataclass
class World:
    """A model whose lots are lent and taken back at random, while steps are launched and end."""

    hybrid: HybridModel
    copier: WatchedCopier
    rooms: list[list[Tensor]]
    flight: Flight
    away: set[int] = field(default_factory=set)  # lots that are lent, or not back yet
    asked: set[int] = field(default_factory=set)
    trips: int = 0

    def begin(self) -> None:
        self.copier.pages.append([room for lot in set(range(LOTS)) - self.away for room in self.rooms[lot]])
        self.flight.begin()

    def end(self) -> None:
        self.flight.end()
        del self.copier.pages[0]

    def lend(self, lot: int) -> None:
        self.away.add(lot)
        self.hybrid.lend(lot)

    def take_back(self, lot: int) -> None:
        self.asked.add(lot)
        self.hybrid.take_back(lot)

    def collect(self) -> None:
        for lot in self.hybrid.returned():
            assert lot in self.asked
            self.asked.remove(lot)
            self.away.remove(lot)
            self.trips += 1
            for room in self.rooms[lot]:
                self.flight.writes(room)  # the next owner of the pages may write them at once
                assert not room.any()


@dataclass(frozen=True)
class FirstWhole(Split):
    """All experts of the first layer are on the device."""

    def placement(self, spec: Model) -> Placement:
        of = super().placement(spec)
        first, owners = min(of.owners), dict(of.owners)
        return replace(of, owners=owners | {first: (0,) * len(owners[first])})


def new_world(folder: Path, pool: Pool, of: type[Split] = Split) -> World:
    kept: list[Kept] = []
    copier = WatchedCopier()
    loaded = load_split(
        make_tiny("qwen3-moe", folder), pool, of(0.25, inclusive=True, spare=2), "sim",
        lambda: Copiers(copier, PromptCopier()), kept,
    )  # fmt: skip
    loaded.make(LIMITS, PAGES)
    hybrid = kept[-1].hybrid
    assert hybrid.moves is not None
    hybrid.moves.heat = RestlessHeat(hybrid.moves._resident.shape)
    memory = torch.full((LOTS, ROOMS, -(-hybrid.room_bytes // 256) * 256), 0xFF, dtype=torch.uint8)
    rooms = [[room[: hybrid.room_bytes] for room in lot] for lot in memory]
    hybrid.may_lend(rooms)
    copier.flight = Flight(hybrid)
    return World(hybrid, copier, rooms, copier.flight)


def check_bytes(hybrid: HybridModel) -> None:
    """Check that each expert in VRAM has its own bytes."""
    assert hybrid.moves is not None
    for where, layer in zip(hybrid.moves._where, hybrid.layers, strict=True):
        for expert, slot in where.slot_of.items():
            for here, own in slot.parts(*layer.memory.in_place(layer.memory.number_of[expert])):
                assert torch.equal(here, own)


@pytest.mark.parametrize("seed", range(6))
def test_no_launch_reads_what_is_written(seed: int, pool: Pool, tmp_path: Path) -> None:
    world, draw = new_world(tmp_path, pool), random.Random(seed)
    assert world.hybrid.moves is not None
    before = world.hybrid.moves._resident.sum()
    spare = spare_slots(world.hybrid)
    for _ in range(600):
        what = draw.random()
        if what < 0.4 and len(world.flight.named) < 3:
            world.begin()
        elif what < 0.75 and world.flight.named:
            world.end()
        elif what < 0.9:
            world.collect()
        else:
            lot = draw.randrange(LOTS)
            if lot not in world.away:
                world.lend(lot)
            elif lot not in world.asked:
                world.take_back(lot)
    assert world.trips >= 5
    assert world.copier.fetched >= 20
    assert world.hybrid.moves.moved.experts >= 20, "experts swap meanwhile, also those in lent pages"
    while world.flight.named:
        world.end()
    for lot in world.away - world.asked:
        world.take_back(lot)
    for _ in range(30):  # moves and copies end
        world.begin()
        world.end()
        world.collect()
    assert not world.away
    assert world.hybrid.moves._resident.sum() - before in range(-2, 3), "moves are under way"
    assert spare_slots(world.hybrid) + len(world.hybrid.moves._moves) == spare
    check_places(world.hybrid, inclusive=True, fewest=0)
    check_bytes(world.hybrid)


def test_a_layer_whole_on_the_device_stays_there(pool: Pool, tmp_path: Path) -> None:
    """The CPU computes no expert of such a layer, so none may replace a spare slot that has left."""
    world = new_world(tmp_path, pool, FirstWhole)
    moves, tables = world.hybrid.moves, world.hybrid.tables
    assert moves is not None
    assert tables is not None
    for _ in range(20):
        for lot in range(LOTS):
            world.lend(lot)
        for _ in range(20):  # swaps make some rooms spare slots
            world.begin()
            world.end()
            world.collect()
        for lot in range(LOTS):
            world.take_back(lot)
        while world.away:
            world.begin()
            world.end()
            world.collect()
            assert (tables.owners[0, : world.hybrid.layers[0].memory.experts] == 0).all()
    check_bytes(world.hybrid)


def spare_slots(hybrid: HybridModel) -> int:
    assert hybrid.moves is not None
    return sum(map(len, hybrid.moves._spare.values())) + len(hybrid.moves._left)


def test_an_idle_engine_fills_lent_pages_evenly(pool: Pool, tmp_path: Path) -> None:
    """Nothing is launched: `returned` alone goes on. Layers get equally many, and counters tell."""
    world = new_world(tmp_path, pool)
    moves = world.hybrid.moves
    assert moves is not None
    before = moves._resident.sum(1)
    world.lend(0)
    assert world.hybrid.filling
    for _ in range(20):
        world.collect()
    assert not world.hybrid.filling
    more = moves._resident.sum(1) - before
    assert more.sum() == ROOMS
    assert more.max() - more.min() <= 1
    counters = world.hybrid.counters()
    assert (counters.lent_slots, counters.lent_bytes) == (ROOMS, ROOMS * world.hybrid.room_bytes)
    assert moves.moved.nbytes > 0
    check_bytes(world.hybrid)
    world.take_back(0)
    for _ in range(3):
        world.collect()
    assert not world.away, "nothing was in flight"
    assert world.hybrid.counters().lent_slots == 0
    assert (moves._resident.sum(1) == before).all()


def test_nothing_is_taken_back_during_a_pass(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass has a copy of the tables: what they name stays until its end."""
    world = new_world(tmp_path, pool)
    world.lend(0)
    for _ in range(20):
        world.collect()
    with monkeypatch.context() as patch:
        patch.setattr(HybridModel, "_in_pass", True)
        world.take_back(0)
        for _ in range(20):
            world.begin()
            world.end()
            world.collect()
        assert world.away == {0}
        assert world.hybrid.counters().lent_slots == ROOMS
    for _ in range(4):
        world.collect()
    assert not world.away


def test_pages_are_lent_only_where_ram_has_copies(pool: Pool, tmp_path: Path) -> None:
    for split, why in ((Split(0.5, inclusive=False, spare=2), "every expert"), (Split(0.5, inclusive=True), "move")):
        kept: list[Kept] = []
        load_split(make_tiny("qwen3-moe", tmp_path / why), pool, split, "sim", keep=kept).make(LIMITS, PAGES)
        with pytest.raises(ValueError, match=why):
            kept[-1].hybrid.may_lend([[torch.empty(kept[-1].hybrid.room_bytes, dtype=torch.uint8)]])
        kept[-1].close()


def test_a_slot_in_a_room_is_aligned_and_apart(pool: Pool, tmp_path: Path) -> None:
    world = new_world(tmp_path, pool)
    for layer in world.hybrid.layers:
        slot = slot_in(world.rooms[0][0], layer.memory)
        assert (slot.down.data_ptr() - slot.address) % 256 == 0
        assert not overlap(slot.up, slot.down)
        shape = layer.memory.shape
        assert (slot.up.nbytes, slot.down.nbytes) == (shape.up.matrix_bytes, shape.down.matrix_bytes)
