"""Lent pages: where lots lie, when they are lent and come back; no request is preempted or reads wrong pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from proa.cache.lots import Demand, Lots, lots_due, lots_of, lots_to_lend
from proa.engine.scheduling.lending import IDLE_S, KEPT_S, LOOK_S, STORED_S, LentPages
from scheduler_sim import FakeEngine, ask, make_limits

# ---- lots


@pytest.mark.parametrize(
    ("page_bytes", "pool_pages", "expert_bytes", "lot_pages", "count", "rooms"),
    [
        ([512, 512], 40, 1000, 2, 19, 2),  # an expert is 1024 bytes with its alignment
        ([512, 512], 41, 1025, 3, 13, 2),
        ([2048], 9, 1000, 1, 8, 2),  # a page holds two
        ([4096, 512], 30, 4096, 8, 3, 9),  # single pages would waste the small tensor
        ([1024, 512], 30, 4096, 8, 3, 3),  # 8 pages hold 2 and 1, 4 would hold 1 and waste half a room
        ([512], 5, 4096, 8, 0, 1),  # the pool is too small
        ([], 5, 4096, 1, 0, 0),
    ],
)
def test_lots_waste_little(
    page_bytes: list[int], pool_pages: int, expert_bytes: int, lot_pages: int, count: int, rooms: int
) -> None:
    lots = lots_of(page_bytes, pool_pages, expert_bytes)
    assert (lots.num_pages, lots.count, lots.rooms_each) == (lot_pages, count, rooms)


@pytest.mark.parametrize("odd", [0, 3])
def test_rooms_lie_in_their_lots_pages_only(odd: int) -> None:
    """odd: bytes of pages are no multiple of the alignment."""
    tensors = [torch.zeros(30, 2, 4, 64 + odd, dtype=torch.bfloat16), torch.zeros(30, 2, 64, dtype=torch.float32)]
    lots = lots_of([tensor[0].nbytes for tensor in tensors], 30, 3000)
    assert lots.count > 1
    for lot in range(lots.count):
        rooms = lots.rooms(lot, tensors)
        assert len(rooms) == lots.rooms_each
        for room in rooms:
            assert not room.any(), "no byte is in two rooms"
            assert any(0 <= (at := room.data_ptr() - t.data_ptr()) < t.nbytes and at % 256 == 0 for t in tensors)
            assert room.nbytes >= 3000
            room.fill_(1)
        pages = {int(page) for tensor in tensors for page in tensor.flatten(1).any(1).nonzero()}
        assert pages <= {page for one in range(lot + 1) for page in lots.pages(one)}
    assert not tensors[0][0].any(), "page 0 is in no lot"
    assert max(map(max, map(lots.pages, range(lots.count)))) == 29


@pytest.mark.parametrize(
    ("short", "demand", "due"),
    [
        (0, Demand(free=9, evictable=0, coming=0, reserve=4), 0),
        (0, Demand(free=1, evictable=3, coming=0, reserve=4), 0),
        (0, Demand(free=1, evictable=0, coming=0, reserve=4), 1),
        (0, Demand(free=1, evictable=0, coming=3, reserve=4), 0),
        (11, Demand(free=1, evictable=0, coming=0, reserve=4), 2),
        (11, Demand(free=1, evictable=0, coming=10, reserve=4), 1),
    ],
)
def test_lots_that_are_due(short: int, demand: Demand, due: int) -> None:
    assert lots_due(short, demand, 10) == due


@pytest.mark.parametrize(("free", "coming", "lots"), [(100, 0, 8), (21, 0, 0), (22, 0, 1), (100, 10, 0)])
def test_lots_that_may_be_lent(free: int, coming: int, lots: int) -> None:
    assert lots_to_lend(Demand(free, 0, coming, reserve=4), headroom_pages=8, lot_pages=10) == lots


# ---- lending


@dataclass
class SimOwner:
    """Writes to lent pages at once, and gives lots back at the `late`-th look after they were asked for."""

    fake: FakeEngine
    lots: Lots
    late: int = 2
    closing: dict[int, int] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)
    trips: int = 0
    filling: bool = False
    rooms_wanted: int = 1 << 20

    def lend(self, lot: int) -> None:
        assert lot not in self.lent
        self.lent.add(lot)
        for page in self.lots.pages(lot):
            for slot in range(self.fake.limits.page_tokens):
                self.fake.pool[page, slot] = (-1, -1, "expert")

    def take_back(self, lot: int) -> None:
        assert lot in self.lent
        assert lot not in self.closing
        self.closing[lot] = self.late

    def returned(self) -> list[int]:
        self.closing = {lot: looks - 1 for lot, looks in self.closing.items()}
        back = [lot for lot, looks in self.closing.items() if looks <= 0]
        for lot in back:
            del self.closing[lot]
            self.lent.remove(lot)
            self.trips += 1
        return back


class World:
    """A fake engine whose pages are lent, with a clock of its own."""

    def __init__(self, num_pages: int = 64, lot_pages: int = 6, *, with_cache: bool = True, **limits: int) -> None:
        self.fake = FakeEngine(make_limits(context_tokens=4 * num_pages, **limits), num_pages, with_cache)
        self.allocator = self.fake.allocator
        self.allocator._lowest_first = True
        self.lots = Lots(lot_pages, (num_pages - 1) // lot_pages, [[0]], 1, num_pages)
        self.owner, self.now_s, self.stored = SimOwner(self.fake, self.lots), 0.0, False
        self.fake.scheduler.room.lent = LentPages(
            self.lots, self.owner, self.allocator, self.fake.cache, 4, stored=lambda: self.stored,
            clock=lambda: self.now_s,
        )  # fmt: skip

    def rest(self, seconds: float) -> None:
        """Time without work passes."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            self.fake.scheduler.collect()
            self.allocator.check()

    def run(self) -> None:
        while self.fake.scheduler.has_work:
            self.step()

    def step(self) -> None:
        self.now_s += 0.01
        self.fake.step()
        self.fake.scheduler.check()

    @property
    def preemptions(self) -> int:
        return self.fake.scheduler.stats().preemptions


def test_idle_pages_are_lent_and_a_long_prompt_gets_them_back() -> None:
    world = World(with_cache=False)
    world.fake.submit(ask("long", [i % 9 for i in range(200)], 30))
    world.run()
    world.rest(IDLE_S - LOOK_S)
    assert world.allocator.num_lent <= 6, "only pages that no request has had"
    world.rest(IDLE_S)
    headroom, reserve = 64 // 8, 4
    assert world.allocator.num_lent == (64 - headroom - reserve) // 6 * 6
    stats = world.fake.scheduler.stats()
    assert stats.pages_free == stats.pages_total, "pages that are lent can be had"
    world.fake.submit(ask("again", [i % 9 for i in range(200)], 30))
    world.run()
    assert world.preemptions == 0
    assert world.fake.got["again"] == world.fake.got["long"]


def test_no_more_is_lent_than_experts_fill() -> None:
    world = World(with_cache=False)
    world.owner.rooms_wanted = 2  # always: the lots of one look
    world.rest(IDLE_S + LOOK_S)
    assert world.allocator.num_lent == 2 * 6
    world.owner.rooms_wanted = 0
    world.rest(2 * IDLE_S)
    assert world.allocator.num_lent == 2 * 6
    assert not world.fake.scheduler.room.lent.due_later


def test_growth_preempts_no_request_and_waits_for_no_lot() -> None:
    """Decode grows over all pages: lots come back before it needs them."""
    world = World(with_cache=False)
    world.rest(2 * IDLE_S)
    assert world.allocator.num_lent > 0
    world.fake.submit(ask("grows", [1, 2, 3], 240))
    world.fake.submit(ask("stays", [4, 5], 3))
    steps = 0
    while world.fake.scheduler.has_work:
        world.step()
        steps += 1
    assert world.preemptions == 0
    assert world.allocator.num_lent == 0 or world.owner.trips > 5
    assert steps <= 242, "no step without a token"


def test_a_request_waits_for_lots_rather_than_preempt_one_of_worse_priority() -> None:
    world = World(with_cache=False)
    world.fake.submit(ask("worse", [1] * 100, 30, priority=1))
    world.step()
    world.rest(2 * IDLE_S)
    assert world.allocator.num_lent >= 24
    world.fake.submit(ask("better", [2] * 100, 4))
    world.run()
    assert world.preemptions == 0


def test_cached_prefixes_stay_until_they_were_not_used_for_long() -> None:
    for stored, kept_s in ((False, KEPT_S), (True, STORED_S)):
        world = World()
        world.stored = stored
        world.fake.submit(ask("long", [i % 9 for i in range(200)], 2))
        world.run()
        cached = world.fake.scheduler.stats().pages_cached
        assert cached >= 50
        world.rest(kept_s - 2 * LOOK_S)
        assert world.fake.scheduler.stats().pages_cached == cached
        world.rest(2 * IDLE_S + 4 * LOOK_S)
        assert world.fake.scheduler.stats().pages_cached < cached
        assert world.allocator.num_lent >= 48


def test_a_prefix_in_use_now_and_then_stays() -> None:
    world = World()
    world.stored = True
    for name in range(6):
        world.fake.submit(ask(str(name), [i % 9 for i in range(200)], 2))
        world.run()
        world.rest(STORED_S - 1)
    assert world.fake.cached_tokens["5"] >= 190


@settings(
    max_examples=examples(40), deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(seed=st.integers(0, 10**6), with_cache=st.booleans(), lot_pages=st.integers(1, 9), late=st.integers(1, 5))
def test_any_traffic_has_right_answers(seed: int, with_cache: bool, lot_pages: int, late: int) -> None:
    """Lent pages are overwritten at once, so a page that is lent and in use would give wrong answers."""
    world, draw = World(40, lot_pages, with_cache=with_cache), random.Random(seed)
    world.owner.late = late
    for name in range(12):
        world.stored = draw.random() < 0.5
        tokens = [draw.randrange(1, 4) for _ in range(draw.choice((2, 9, 40, 120)))]
        world.fake.submit(ask(str(name), tokens, draw.randrange(1, 39)))
        for _ in range(draw.choice((0, 3, 60))):
            if world.fake.scheduler.has_work:
                world.step()
        if draw.random() < 0.3:
            world.fake.abort(str(name))
        world.rest(draw.choice((0.0, 2 * IDLE_S, STORED_S + 2 * IDLE_S)))
    world.run()
    world.fake.check_answers()
