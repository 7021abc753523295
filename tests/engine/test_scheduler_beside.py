"""Prefill steps planned beside decode: their items, and which requests wait for which."""

from __future__ import annotations

import pytest

from proa.types import EngineRequest
from scheduler_sim import FakeEngine, ask, make_limits


def decoding(*requests: EngineRequest, num_pages: int = 64, **limits: int) -> FakeEngine:
    """An engine in which these requests have their first token."""
    fake = FakeEngine(make_limits(**limits), num_pages, turns=True)
    for request in requests:
        fake.submit(request)
    fake.step()
    return fake


def begin(fake: FakeEngine) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Run a step. Returns the ids that decode in it, and (id, start, number of tokens) of each item beside it."""
    plan = fake.begin()
    beside = [] if fake.beside is None else fake.beside[0].items
    names = [item.request.id for item in plan.items] if plan else []
    if plan:
        fake.finish(plan)
    return names, [(item.request.id, item.start, item.num_tokens) for item in beside]


def test_prompts_have_a_step_of_their_own_with_the_whole_budget() -> None:
    fake = decoding(ask("a", [1, 2], 20), ask("b", [3], 20))
    fake.submit(ask("long", range(20), 5))
    fake.submit(ask("late", [4], 5))
    assert begin(fake) == (["a", "b"], [("long", 0, 16)])
    assert begin(fake) == (["a", "b"], [("long", 0, 16)]), "still in flight"
    fake.finish_beside()
    assert begin(fake) == (["a", "b"], [("long", 16, 4), ("late", 0, 1)])
    assert begin(fake) == (["a", "b"], [("long", 16, 4), ("late", 0, 1)])
    fake.finish_beside()
    assert begin(fake) == (["a", "b", "long", "late"], [])
    fake.drain()


def test_a_prompt_alone_has_a_step_beside_none() -> None:
    fake = FakeEngine(make_limits(), 64, turns=True)
    fake.submit(ask("a", range(20), 5))
    assert begin(fake) == ([], [("a", 0, 16)])
    fake.finish_beside()
    assert begin(fake) == ([], [("a", 16, 4)])
    fake.finish_beside()
    fake.submit(ask("b", range(20), 5))
    assert begin(fake) == (["a"], [("b", 16, 4)]), "the rest is in the prefix cache"
    fake.drain()


def over(fake: FakeEngine, short_tokens: int) -> list[tuple[str, int, int]]:
    """Plan a step. Returns (id, start, number of tokens) of each item that overtakes the step beside."""
    plan = fake.begin(short_tokens)
    if plan:
        fake.finish(plan)
    return [(i.request.id, i.start, i.num_tokens) for i in fake.over[0].items] if fake.over else []


def test_short_prompts_overtake_a_step_beside() -> None:
    """Whole prompts only, as many as fit; what the prefix cache has does not count."""
    fake = decoding(ask("a", range(20, 36), 20), max_running=8)
    fake.submit(ask("long", range(40), 5))
    assert begin(fake)[1] == [("long", 0, 16)]
    fake.submit(ask("too-long", range(1, 8), 5))
    fake.submit(ask("cached", [*range(20, 36), 1, 2], 5))
    fake.submit(ask("short", [7, 8, 9], 5))
    fake.submit(ask("late", [9, 9], 5))
    assert over(fake, 0) == []
    assert over(fake, 5) == [("cached", 16, 2), ("short", 0, 3)]
    assert over(fake, 5) == [("cached", 16, 2), ("short", 0, 3)], "still in flight"
    assert [event.id for event in fake.finish_over()] == ["cached", "short"]
    assert begin(fake) == (["a", "cached", "short"], [("long", 0, 16)])
    assert over(fake, 5) == [("late", 0, 2)]
    fake.abort("late")
    fake.abort("long")
    fake.finish_beside()
    assert begin(fake)[1] == [], "nothing is beside while a step is over"
    fake.finish_over()
    assert begin(fake)[1] == [("too-long", 0, 7)]
    fake.drain()


def test_a_short_prompt_and_a_long_one_share_no_step_beside() -> None:
    sizes = {"context_tokens": 1 << 15, "max_batch_tokens": 1 << 14, "max_running": 8, "num_pages": 1 << 14}
    for lengths, together in (
        ([8192, 1024, 3000], ["p0", "p2"]),
        ([1024, 8192, 3000], ["p0", "p2"]),
        ([1025, 8192, 3000], ["p0", "p1", "p2"]),
    ):
        fake = decoding(ask("a", [1, 2], 20), **sizes)
        for i, length in enumerate(lengths):
            fake.submit(ask(f"p{i}", [(j + i) % 11 for j in range(length)], 5))
        assert [name for name, *_ in begin(fake)[1]] == together


def test_a_step_beside_goes_on_after_decode_has_ended() -> None:
    fake = decoding(ask("a", [1, 2], 3))
    fake.submit(ask("b", range(10), 5))
    begin(fake)
    assert begin(fake) == (["a"], [("b", 0, 10)])
    assert begin(fake) == ([], [("b", 0, 10)]), "only the step beside is left"
    assert fake.scheduler.has_work
    fake.finish_beside()
    assert begin(fake) == (["b"], [])
    fake.drain()


def test_no_step_goes_ahead_of_one_with_another_beside() -> None:
    fake = decoding(ask("a", [1, 2], 20))
    fake.submit(ask("b", range(10), 5))
    assert fake.begin()
    assert fake.begin_ahead() is None
    fake.finish(fake.plans[0])
    fake.finish_beside()
    assert fake.begin()
    assert fake.begin_ahead() is not None
    while fake.plans:
        fake.finish(fake.plans[0])
    fake.drain()


def test_no_page_is_taken_from_a_request_beside() -> None:
    """a needs a page that only b has: it keeps its pages and waits until b's step ends; then b is preempted."""
    fake = decoding(ask("a", [1, 2, 3], 12), num_pages=5)
    fake.submit(ask("b", [7] * 9, 5))
    assert begin(fake) == (["a"], [("b", 0, 9)])
    for _ in range(4):
        assert begin(fake)[0] == ["a"]
    assert begin(fake) == ([], [("b", 0, 9)])
    stats = fake.scheduler.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (2, 0, 0)
    fake.finish_beside()
    assert begin(fake)[0] == ["a"]
    assert fake.scheduler.stats().preemptions == 1
    fake.drain()


def test_a_better_priority_takes_all_slots() -> None:
    """All decoding requests are preempted."""
    fake = decoding(ask("a", [1, 2], 20, priority=1), max_running=1)
    fake.submit(ask("b", range(10), 5))
    assert begin(fake) == ([], [("b", 0, 10)])
    fake.finish_beside()
    fake.drain()


def test_an_aborted_request_beside() -> None:
    fake = decoding(ask("a", [1, 2], 20))
    fake.submit(ask("b", range(10), 5))
    begin(fake)
    assert fake.beside is not None
    fake.abort("b")
    assert not fake.scheduler.counts(fake.beside[0].items[0])
    assert begin(fake)[0] == ["a"], "its pages are held until it is committed"
    assert fake.scheduler.stats().running == 2
    assert fake.finish_beside() == []
    assert fake.scheduler.stats().running == 1
    fake.drain()


def test_only_what_is_in_flight_is_committed() -> None:
    fake = decoding(ask("a", [1, 2], 20))
    fake.submit(ask("b", range(10), 5))
    begin(fake)
    assert fake.beside is not None
    plan = fake.beside[0]
    with pytest.raises(ValueError, match="got 0 tokens"):
        fake.scheduler.commit(plan, {})
    fake.finish_beside()
    with pytest.raises(ValueError, match="not in flight"):
        fake.scheduler.commit(plan, {"b": 1})
    fake.drain()
