"""StateCopies: tables for each promise, a state machine of the prefix tree with copies against a dict of digests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples import examples
from proa.cache.pages import IntegrityError, PageAllocator
from proa.cache.pool import allocate_pool, copy_states
from proa.cache.radix import PrefixCache, PrefixNode
from proa.cache.states import StateCopies
from proa.models.spec import Attention, Block, GatedDeltaNet, Mlp, Model, Rope


def filled(count: int = 3) -> StateCopies:
    """Slots 10.. hold copies of a, b, c, in this order."""
    copies = StateCopies(10, count)
    for name in "abcdef"[:count]:
        slot = copies.take()
        assert slot is not None
        copies.keep(name, slot)
    return copies


def order(copies: StateCopies) -> str:
    """Nodes in the order in which their copies are evicted."""
    gone = ""
    while names := sorted(map(str, copies.nodes)):
        assert copies.take() is not None
        (name,) = set(names) - set(map(str, copies.nodes))
        gone += name
    return gone


def test_slots_are_handed_out_once() -> None:
    copies = StateCopies(4, 2)
    assert [copies.take(), copies.take(), copies.take()] == [4, 5, None]
    copies.check([4, 5])
    copies.give_back(4)
    copies.keep("a", 5)
    copies.check([])
    assert copies.use("a") == 5
    assert "a" in copies
    assert "b" not in copies


def test_copies_need_a_slot() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 1"):
        StateCopies(4, 0)


def test_the_least_recently_used_goes_first() -> None:
    copies = filled()
    copies.use("a")
    assert order(copies) == "bca"


def test_passed_copies_are_evicted_first() -> None:
    copies = filled()
    copies.pass_by("c")
    assert order(copies) == "cab"


def test_a_used_copy_is_not_passed() -> None:
    copies = filled()
    copies.use("b")
    copies.pass_by("b")
    copies.pass_by("unknown")
    assert order(copies) == "acb"


def test_a_second_copy_of_a_node_is_returned() -> None:
    copies = filled(2)
    slot = copies.take()
    assert slot == 10, "the copy of a was evicted"
    copies.keep("b", slot)
    copies.check([])
    assert copies.use("b") == 11


def test_a_copy_goes_with_its_node() -> None:
    copies = filled()
    copies.use("b")
    copies.drop("b")
    copies.drop("unknown")
    assert copies.take() == 11
    copies.check([11])


def test_lost_and_doubled_slots_are_found() -> None:
    copies = filled()
    assert copies.take() == 10
    with pytest.raises(IntegrityError, match="slots"):
        copies.check([])
    copies.give_back(10)
    copies.give_back(10)
    with pytest.raises(IntegrityError, match="slots"):
        copies.check([])


def make(pages: int = 8, copies: int = 3) -> tuple[PrefixCache, PageAllocator, StateCopies]:
    allocator, held = PageAllocator(pages), StateCopies(0, copies)
    return PrefixCache(4, allocator, held), allocator, held


def fill(cache: PrefixCache, allocator: PageAllocator, keys: str, *copied: int) -> PrefixNode:
    """Insert a request's `keys`, with copies after these numbers of them."""
    node = cache.match("").node
    cache.lock(node)
    held: list[int] = []
    for key in keys:
        node, page = cache.insert(node, [key], allocator.alloc(1) or [])
        held += page
        if node.depth in copied:
            slot = cache.copies.take() if cache.copies else None
            assert slot is not None
            cache.copies.keep(node, slot)  # type: ignore[union-attr]
    cache.unlock(node)
    allocator.release(held)
    cache.check()
    return node


def test_a_locked_copy_is_not_evicted() -> None:
    copies = filled(2)
    slot_b = copies.slot("b")
    copies.lock("a")
    assert copies.take() == slot_b
    assert copies.slot("a") is not None
    assert copies.take() is None, "one slot is reserved, the other one locked"
    copies.unlock("a")
    assert copies.take() is not None


def test_slots_to_avoid_are_not_taken() -> None:
    copies = filled(3)
    slot_a, slot_b = copies.slot("a"), copies.slot("b")
    assert slot_a is not None
    assert slot_b is not None
    assert copies.take({slot_a}) == slot_b
    copies.give_back(slot_b)
    assert copies.take({slot_b, slot_a}) not in (slot_a, slot_b, None)
    assert copies.take({slot_a, slot_b}) is None
    assert copies.take({slot_a}) == slot_b


@pytest.mark.parametrize(
    ("asked", "depth", "known"),
    [("abcde", 4, 5), ("abcd", 4, 4), ("abc", 2, 3), ("abx", 2, 2), ("a", 0, 1), ("", 0, 0)],
)
def test_a_prompt_goes_on_from_a_copy_only(asked: str, depth: int, known: int) -> None:
    cache, allocator, _ = make()
    fill(cache, allocator, "abcde", 2, 4)
    match = cache.match(asked)
    assert (match.node.depth, len(match.pages), match.num_idle, match.known.depth) == (depth, depth, depth, known)


def test_idle_pages_are_those_up_to_the_copy() -> None:
    cache, allocator, _ = make()
    node = fill(cache, allocator, "abcde", 2, 4)
    at = node.parent.parent if node.parent else None  # abc
    assert at is not None
    cache.lock(at)
    assert [cache.match(keys).num_idle for keys in ("abcde", "abc")] == [1, 0]


def test_a_page_takes_its_copy_along() -> None:
    cache, allocator, copies = make(pages=5)
    fill(cache, allocator, "abcde", 2, 4)
    cache.evict(2)
    cache.check()
    copies.check([])
    assert (len(copies.nodes), cache.match("abcde").node.depth) == (1, 2)
    fill(cache, allocator, "abcde")
    assert cache.match("abcde").node.depth == 2, "a page that is cached again has no copy"


def test_slots_are_copied_in_all_layers_one_after_the_other() -> None:
    mixers = (GatedDeltaNet(8, 1, 2, 4, 4, 3), Attention(8, 2, 1, 4, Rope(4)), GatedDeltaNet(8, 1, 2, 4, 8, 3))
    spec = Model(8, 16, tuple(Block(mixer, Mlp(8, 8)) for mixer in mixers), 1e-6, 64)
    caches = allocate_pool(spec, 2, 4, torch.float32, sequences=4)
    tensors = [state for layer in caches for cache in layer for state in cache.states]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    copy_states(caches, [(0, 2), (2, 3)])
    assert len(tensors) == 4
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(new, old[[0, 1, 0, 0]])


class Trees(RuleBasedStateMachine):
    """Sequences over two keys that begin, leave copies, continue from copies and end; pages and slots run out often.
    `states` is what is in the slots: the prefix itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.allocator, self.copies = make(pages=9, copies=3)
        self.states: dict[int, str] = {}
        self.live: list[tuple[str, PrefixNode, list[int]]] = []

    @rule(text=st.text("ab", max_size=6))
    def begin(self, text: str) -> None:
        match = self.cache.match(text)
        if match.pages:
            assert self.states[self.copies.use(match.node)] == text[: match.node.depth], "a stale copy"
        self.cache.lock(match.node)
        self.allocator.share(match.pages)
        self.live.append((text[: match.node.depth], match.node, list(match.pages)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), key=st.sampled_from("ab"), copied=st.booleans(), passing=st.booleans())
    def go_on(self, data: st.DataObject, key: str, copied: bool, passing: bool) -> None:
        i = data.draw(st.integers(0, len(self.live) - 1))
        text, node, pages = self.live[i]
        if not self.allocator.num_free and not self.cache.evict(1):
            return
        deeper, held = self.cache.insert(node, [key], self.allocator.alloc(1) or [])
        if copied and (slot := self.copies.take()) is not None:
            self.states[slot] = text + key
            self.copies.keep(deeper, slot)
            if passing:
                self.copies.pass_by(node)
        self.live[i] = text + key, deeper, pages + held

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, node, pages = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.release(pages)
        self.cache.unlock(node)

    @rule(pages=st.integers(1, 9))
    def evict(self, pages: int) -> None:
        self.cache.evict(pages)

    @invariant()
    def nothing_is_leaked(self) -> None:
        self.allocator.check()
        self.cache.check()
        self.copies.check([])


Trees.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestTrees = Trees.TestCase
