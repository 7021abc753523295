"""PageAllocator: tables for the edges, a state machine against plain counting."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from examples import examples
from proa.cache.pages import IntegrityError, PageAllocator

NUM_PAGES = 7


def test_alloc_is_all_or_nothing() -> None:
    allocator = PageAllocator(3)
    assert allocator.alloc(4) is None
    assert allocator.num_free == 3
    assert allocator.alloc(0) == []
    assert sorted(allocator.alloc(3) or []) == [0, 1, 2]
    assert allocator.alloc(1) is None


def test_a_page_is_free_after_its_last_release() -> None:
    allocator = PageAllocator(2)
    pages = allocator.alloc(1) or []
    allocator.share(pages)
    allocator.release(pages)
    assert (allocator.num_free, allocator.references(pages[0])) == (1, 1)
    allocator.release(pages)
    assert allocator.num_free == 2
    allocator.check()


@pytest.mark.parametrize("misuse", ["share", "release"])
def test_a_free_page_cannot_be_shared_or_released(misuse: str) -> None:
    allocator = PageAllocator(2)
    with pytest.raises(IntegrityError, match="page 1 is free"):
        getattr(allocator, misuse)([1])
    allocator.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a._free.append(0), "free pages with references"),
        (lambda a: a._free.append(a._free[0]), "entries"),
        (lambda a: a._free.pop(), "not free"),
        (lambda a: a._references.__setitem__(0, -1), "negative"),
        (lambda a: setattr(a, "num_lent", 1), "lent"),
    ],
)
def test_check_detects_damage(damage, message: str) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    damage(allocator)
    with pytest.raises(IntegrityError, match=message):
        allocator.check()


def test_the_lowest_pages_are_allocated_first() -> None:
    allocator = PageAllocator(6, lowest_first=True)
    assert allocator.alloc(4) == [0, 1, 2, 3]
    allocator.release([1])
    allocator.release([3, 0])
    assert allocator.alloc(4) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda a: a.lend(range(1, 3)), "to be lent, some are in use"),
        (lambda a: a.lend(range(3, 4)), "to be lent, some are in use"),
        (lambda a: a.take_back(range(2, 4)), "taken back, some are not lent"),
        (lambda a: a.share([3]), "page 3 is free"),
        (lambda a: a.release([3]), "page 3 is free"),
    ],
)
def test_lent_pages_are_nobodys(misuse, message: str) -> None:
    allocator = PageAllocator(4, lowest_first=True)
    assert allocator.alloc(2) == [0, 1]
    allocator.lend(range(3, 4))
    with pytest.raises(IntegrityError, match=message):
        misuse(allocator)
    assert (allocator.num_free, allocator.num_lent, allocator.references(3)) == (1, 1, 0)
    allocator.check()


class PagesAgainstCounting(RuleBasedStateMachine):
    lowest_first = False

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, lowest_first=self.lowest_first)
        self.holders: Counter[int] = Counter()
        self.lent: list[range] = []

    @property
    def num_lent(self) -> int:
        return sum(map(len, self.lent))

    @rule(first=st.integers(0, NUM_PAGES - 1), count=st.integers(1, 3))
    def lend(self, first: int, count: int) -> None:
        pages = range(first, min(first + count, NUM_PAGES))
        if set(pages) & {*self.holders, *(page for lot in self.lent for page in lot)}:
            with pytest.raises(IntegrityError):
                self.allocator.lend(pages)
            return
        self.allocator.lend(pages)
        self.lent.append(pages)

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        if self.lent:
            lot = data.draw(st.sampled_from(self.lent))
            self.allocator.take_back(lot)
            self.lent.remove(lot)

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def alloc(self, num_pages: int) -> None:
        pages = self.allocator.alloc(num_pages)
        if num_pages > NUM_PAGES - len(self.holders) - self.num_lent:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == num_pages
        assert not set(pages) & {*self.holders, *(page for lot in self.lent for page in lot)}
        if self.lowest_first:
            assert pages == sorted(pages)
        self.holders.update(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.holders) or [0]))) if self.holders else []
        self.allocator.share(pages)
        self.holders.update(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True)) if self.holders else []
        self.allocator.release(pages)
        self.holders = +(self.holders - Counter(pages))

    @invariant()
    def agrees(self) -> None:
        self.allocator.check()
        assert self.allocator.num_free == NUM_PAGES - len(self.holders) - self.num_lent
        assert all(self.allocator.references(page) == self.holders[page] for page in range(NUM_PAGES))


class LowestPagesAgainstCounting(PagesAgainstCounting):
    lowest_first = True


PagesAgainstCounting.TestCase.settings = LowestPagesAgainstCounting.TestCase.settings = settings(
    max_examples=examples(100),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no defect
)
TestPages = PagesAgainstCounting.TestCase
TestLowestPages = LowestPagesAgainstCounting.TestCase
