"""PrefixCache: tables for each promise, a state machine against a naive model (a dict from paths to pages)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples import examples
from proa.cache.pages import IntegrityError, PageAllocator
from proa.cache.radix import PrefixCache, PrefixNode

Keys = tuple[Hashable, ...]


class Holder:
    """A user of the tree like the scheduler: it holds page references and one lock."""

    def __init__(self, cache: PrefixCache, allocator: PageAllocator, keys: Keys) -> None:
        self.cache, self.allocator, self.keys = cache, allocator, keys
        match = cache.match(keys)
        cache.lock(match.node)
        allocator.share(match.pages)
        self.node: PrefixNode = match.node
        self.pages = list(match.pages)
        self.num_matched = len(match.pages)

    def compute(self, pages: Sequence[int], num_pages: int) -> None:
        """Fill `pages` with what follows the match, and give the first num_pages of it to the tree."""
        self.pages += pages
        first = self.node.depth
        part = slice(first, first + num_pages)
        self.node, self.pages[part] = self.cache.insert(self.node, self.keys[part], self.pages[part])

    def release(self) -> None:
        self.allocator.release(self.pages)
        self.cache.unlock(self.node)


def fill(cache: PrefixCache, allocator: PageAllocator, keys: Keys) -> list[int]:
    """Insert the pages of a request that computes `keys` and ends."""
    holder = Holder(cache, allocator, keys)
    holder.compute(allocator.alloc(len(keys) - holder.num_matched) or [], len(keys))
    holder.release()
    return holder.pages


def make(num_pages: int = 16) -> tuple[PrefixCache, PageAllocator]:
    allocator = PageAllocator(num_pages)
    return PrefixCache(4, allocator), allocator


@pytest.mark.parametrize(
    ("tokens", "first_page", "num_keys"),
    [(0, 0, 0), (3, 0, 0), (4, 0, 1), (7, 0, 1), (8, 0, 2), (8, 1, 1), (8, 2, 0), (8, 5, 0)],
)
def test_a_key_for_each_full_page(tokens: int, first_page: int, num_keys: int) -> None:
    cache, _ = make()
    keys = cache.page_keys(range(tokens), "salt", first_page)
    assert len(keys) == num_keys
    assert keys == cache.page_keys(range(tokens), "salt")[first_page:]


def test_keys_tell_tokens_and_salts_apart() -> None:
    cache, _ = make()
    seen = {
        tuple(cache.page_keys(tokens, salt))
        for tokens in ([1, 2, 3, 4], [1, 2, 4, 3], [256, 2, 3, 4], [2**32 - 1] * 4)
        for salt in ("", "a", "b")
    }
    assert len(seen) == 12


def test_the_first_page_of_a_cell_is_known_by_all_its_tokens() -> None:
    cache, _ = make()
    keys = cache.page_keys(range(20), "s", cell_tokens=8)
    assert len(set(keys)) == 5
    assert all(keys[first:] == cache.page_keys(range(20), "s", first, 8) for first in range(6))
    for changed, first in ((5, 0), (11, 2), (13, 2)):
        others = cache.page_keys([*range(changed), 99, *range(changed + 1, 20)], "s", cell_tokens=8)
        assert [one == other for one, other in zip(keys, others, strict=True)].index(False) == first


@pytest.mark.parametrize(
    ("asked", "num_pages"),
    [("", 0), ("a", 1), ("ab", 2), ("abc", 3), ("abcd", 3), ("abx", 2), ("xbc", 0), ("abd", 3), ("bcd", 0)],
)
def test_match_is_the_longest_known_prefix(asked: str, num_pages: int) -> None:
    cache, allocator = make()
    fill(cache, allocator, tuple("abc"))
    fill(cache, allocator, tuple("abd"))
    before = (cache.num_pages, cache.num_evictable, allocator.num_free)
    match = cache.match(tuple(asked))
    assert (len(match.pages), match.num_idle, match.node.depth) == (num_pages, num_pages, num_pages)
    assert cache.path(match.node) == match.pages
    assert before == (cache.num_pages, cache.num_evictable, allocator.num_free) == (4, 4, 12)
    cache.check()


def test_a_duplicate_is_exchanged_for_the_page_of_the_tree() -> None:
    cache, allocator = make()
    first, second = (Holder(cache, allocator, tuple("ab")) for _ in range(2))
    assert allocator.alloc(4) == [0, 1, 2, 3]
    first.compute([0, 1], 2)
    second.compute([2, 3], 2)
    assert first.pages == second.pages == [0, 1]
    assert [allocator.references(page) for page in range(4)] == [3, 3, 0, 0]
    first.release()
    second.release()
    assert cache.num_evictable == cache.num_pages == 2
    cache.check()


def test_locked_pages_stay_and_leaves_go_first() -> None:
    cache, allocator = make()
    fill(cache, allocator, tuple("abcd"))
    holder = Holder(cache, allocator, tuple("ab"))
    assert (cache.num_pages, cache.num_evictable) == (4, 2)
    assert cache.evict(1) == 1
    assert len(cache.match(tuple("abcd")).pages) == 3
    assert cache.evict(9) == 1
    assert cache.match(tuple("abcd")).pages == holder.pages
    holder.release()
    assert cache.evict(9) == 2
    assert allocator.num_free == 16
    cache.check()


def test_least_recently_used_goes_first() -> None:
    cache, allocator = make()
    for keys in ("ab", "cd", "ef"):
        fill(cache, allocator, tuple(keys))
    Holder(cache, allocator, tuple("ab")).release()  # used again
    Holder(cache, allocator, tuple("c")).release()  # its tail d was not
    order = []
    while cache.num_pages:
        known = {k for keys in ("ab", "cd", "ef") for k in keys[: len(cache.match(tuple(keys)).pages)]}
        cache.evict(1)
        left = {k for keys in ("ab", "cd", "ef") for k in keys[: len(cache.match(tuple(keys)).pages)]}
        order += known - left
    assert order == ["d", "f", "e", "b", "a", "c"]


def test_unlocking_what_is_not_locked_is_a_bug() -> None:
    cache, allocator = make()
    fill(cache, allocator, tuple("a"))
    with pytest.raises(IntegrityError, match="not locked"):
        cache.unlock(cache.match(tuple("a")).node)


def test_hot_leaves_do_not_pile_up() -> None:
    cache, allocator = make()
    fill(cache, allocator, tuple("ab"))
    for _ in range(1000):
        Holder(cache, allocator, tuple("ab")).release()
    assert len(cache._leaves) < 100
    cache.check()
    assert cache.evict(2) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: setattr(c, "_num_pages", 9), "nodes"),
        (lambda c: setattr(c, "_num_idle", 9), "idle"),
        (lambda c: c._leaves.clear(), "not in the heap of leaves"),
        (lambda c: setattr(c.match("a").node, "busy", 1), "idle"),
        (lambda c: setattr(c.match("ab").node, "page", c.match("a").node.page), "twice"),
        (lambda c: setattr(c.match("ab").node, "parent", None), "another parent"),
        (lambda c: c._allocator.share(c.match("ab").pages), "references"),
    ],
)
def test_check_detects_damage(damage, message: str) -> None:
    cache, allocator = make()
    fill(cache, allocator, tuple("ab"))
    damage(cache)
    with pytest.raises(IntegrityError, match=message):
        cache.check()


def test_a_deep_tree_needs_no_recursion() -> None:
    cache, allocator = make(5000)
    keys = tuple(range(5000))
    fill(cache, allocator, keys)
    assert len(cache.match(keys).pages) == cache.num_evictable == 5000
    cache.check()
    assert cache.evict(5000) == 5000
    allocator.check()


class TreeAgainstDict(RuleBasedStateMachine):
    """The model: `known` maps each cached path of keys to its page; a path is idle if no holder's path covers it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12)
        self.cache = PrefixCache(4, self.allocator)
        self.known: dict[Keys, int] = {}
        self.last_used: dict[Keys, int] = {}
        self.holders: list[Holder] = []
        self.now = 0

    def _covered(self) -> set[Keys]:
        return {h.keys[:depth] for h in self.holders for depth in range(1, h.node.depth + 1)}

    @rule(keys=st.text("ab", max_size=6).map(tuple))
    def start(self, keys: Keys) -> None:
        match = self.cache.match(keys)
        expected = [self.known[keys[:i]] for i in range(1, len(keys) + 1) if keys[:i] in self.known]
        assert match.pages == expected
        idle = [i for i in range(1, len(expected) + 1) if keys[:i] not in self._covered()]
        assert match.num_idle == len(idle)
        self.holders.append(Holder(self.cache, self.allocator, keys))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        left = len(holder.keys) - holder.node.depth
        num_pages = data.draw(st.integers(0, left))
        need = max(0, holder.node.depth + num_pages - len(holder.pages))
        pages = self.allocator.alloc(need)
        if pages is None:
            return
        first = holder.node.depth
        holder.compute(pages, num_pages)
        for depth in range(first + 1, first + num_pages + 1):
            page = self.known.setdefault(holder.keys[:depth], holder.pages[depth - 1])
            assert holder.pages[depth - 1] == page

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.now += 1
        for depth in range(1, holder.node.depth + 1):
            self.last_used[holder.keys[:depth]] = self.now
        holder.release()

    @rule(num_pages=st.integers(0, 4))
    def evict(self, num_pages: int) -> None:
        evictable = self.cache.num_evictable
        assert self.cache.evict(num_pages) == min(num_pages, evictable)
        for _ in range(min(num_pages, evictable)):
            del self.known[self._oldest_idle_leaf()]

    def _oldest_idle_leaf(self) -> Keys:
        idle = set(self.known) - self._covered()
        leaves = [path for path in idle if not any(k[:-1] == path for k in self.known)]
        return min(leaves, key=lambda path: self.last_used[path])

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        self.allocator.check()
        assert self.cache.num_pages == len(self.known)
        assert self.cache.num_evictable == len(set(self.known) - self._covered())
        assert sorted(self.cache.pages()) == sorted(self.known.values())
        for holder in self.holders:
            assert self.cache.path(holder.node) == holder.pages[: holder.node.depth]


TreeAgainstDict.TestCase.settings = settings(
    max_examples=examples(200),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no defect
)
TestTree = TreeAgainstDict.TestCase
