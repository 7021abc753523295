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
    ],
)
def test_check_detects_damage(damage, message: str) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    damage(allocator)
    with pytest.raises(IntegrityError, match=message):
        allocator.check()


class PagesAgainstCounting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.holders: Counter[int] = Counter()

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def alloc(self, num_pages: int) -> None:
        pages = self.allocator.alloc(num_pages)
        if num_pages > NUM_PAGES - len(self.holders):
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == num_pages
        assert not set(pages) & set(self.holders)
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
        assert self.allocator.num_free == NUM_PAGES - len(self.holders)
        assert all(self.allocator.references(page) == self.holders[page] for page in range(NUM_PAGES))


PagesAgainstCounting.TestCase.settings = settings(
    max_examples=examples(100),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no defect
)
TestPages = PagesAgainstCounting.TestCase
