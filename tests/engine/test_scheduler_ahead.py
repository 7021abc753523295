"""Steps planned ahead of the one in flight: when there is one, and how rows that no longer count are discarded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proa.types import EngineRequest
from scheduler_sim import FakeEngine, ask, make_limits, predict


def decoding(*requests: EngineRequest, num_pages: int = 64, **limits: int) -> FakeEngine:
    """An engine whose prompts are all computed, with the next step in flight."""
    fake = FakeEngine(make_limits(**limits), num_pages)
    for request in requests:
        fake.submit(request)
    fake.step()
    assert fake.begin()
    return fake


def pair(answer: int = 20) -> tuple[EngineRequest, EngineRequest]:
    return ask("a", [1, 2, 3], answer), ask("b", [4, 5], answer)


def test_the_same_rows_one_token_later() -> None:
    fake = decoding(*pair())
    plan = fake.begin_ahead()
    assert plan is not None
    assert [(i.request.id, i.start, i.num_tokens, i.samples) for i in plan.items] == [
        ("a", 4, 1, True), ("b", 3, 1, True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not in flight"):
        fake.scheduler.commit(plan, {"a": 1, "b": 1})
    assert fake.scheduler.plan_ahead() is None, "one step at a time is planned ahead"
    assert fake.scheduler.plan() is None
    fake.finish(fake.plans[0])
    fake.finish(plan)
    assert fake.scheduler.plan_ahead() is None, "no step is in flight"
    fake.drain()


def one_aborted() -> FakeEngine:
    fake = decoding(*pair())
    fake.abort("a")
    return fake


SCENES: dict[str, tuple[Callable[[], FakeEngine], bool]] = {
    "nothing else to do": (lambda: decoding(*pair()), True),
    "one ends for certain": (lambda: decoding(pair()[0], ask("b", [4, 5], 2)), True),
    "all end for certain": (lambda: decoding(ask("a", [1, 2, 3], 2), ask("b", [4, 5], 2)), False),
    "one more token until then": (lambda: decoding(pair()[0], ask("b", [4, 5], 3)), True),
    "drafts": (lambda: decoding(*pair(), lookahead_tokens=2), False),
    "a prompt is being computed": (lambda: decoding(pair()[0], ask("b", range(40), 3)), False),
    "one is aborted: its row draws no token": (one_aborted, True),
    "the context ends": (lambda: decoding(ask("a", range(62), 2), max_batch_tokens=64), False),
}


@pytest.mark.parametrize("scene", SCENES)
def test_when_a_step_is_planned_ahead(scene: str) -> None:
    make, there_is = SCENES[scene]
    fake = make()
    assert (fake.begin_ahead() is not None) == there_is
    while fake.plans:
        fake.finish(fake.plans[0])
    fake.drain()


@pytest.mark.parametrize(
    ("max_running", "priority", "there_is"), [(3, 0, False), (2, 0, True), (2, 1, True), (2, -1, False)]
)
def test_a_request_that_can_be_admitted_comes_first(max_running: int, priority: int, there_is: bool) -> None:
    fake = decoding(*pair(), max_running=max_running)
    fake.submit(ask("new", [7, 8], 3, priority=priority))
    assert (fake.begin_ahead() is not None) == there_is


def test_a_request_waiting_for_a_slot_that_gets_free_comes_first() -> None:
    fake = decoding(pair()[0], ask("b", [4, 5], 2), max_running=2)
    fake.submit(ask("new", [7, 8], 3))
    assert fake.begin_ahead() is None
    fake.finish(fake.plans[0])
    plan = fake.step()
    assert plan is not None
    assert [item.request.id for item in plan.items] == ["a", "new"]
    fake.drain()


@pytest.mark.parametrize("how", ["foreseen", "stop", "aborted"])
def test_steps_go_on_ahead_across_an_end(how: str) -> None:
    """Only the first of the two steps after the end has the ended request's row."""
    plain = predict(ask("b", [4, 5], 20), 64).tokens
    count = next(i for i in range(2, 12) if plain[i] not in plain[:i])
    ends = {"foreseen": ask("b", [4, 5], count + 1), "stop": ask("b", [4, 5], 20, stop_token_ids=(plain[count],))}
    fake = decoding(pair()[0], ends.get(how, pair()[1]), ask("c", [9], 20))
    rows = []
    for step in range(count + 3):
        if step == count - 1 and how == "aborted":
            fake.abort("b")
        plan = fake.begin_ahead()
        assert plan is not None
        rows.append([item.request.id for item in plan.items])
        fake.finish(fake.plans[0])
        fake.scheduler.check()
    with_b = {"foreseen": count, "stop": count, "aborted": count - 1}[how]
    assert rows == [["a", "b", "c"]] * with_b + [["a", "c"]] * (count + 3 - with_b)
    fake.finish(fake.plans[0])
    fake.drain()


def test_no_step_ahead_without_a_page() -> None:
    """plan() has to find a page; here it preempts a request."""
    fake = decoding(ask("a", range(6), 6), ask("b", range(10, 16), 6), num_pages=5)
    assert fake.begin_ahead(), "token 7 is the last one that fits into two pages"
    fake.finish(fake.plans[0])
    assert fake.begin_ahead() is None, "one page is free"
    fake.finish(fake.plans[0])
    fake.step()
    assert fake.scheduler.stats().preemptions == 1
    fake.drain()


def test_a_stop_token_in_the_step_before() -> None:
    """The token after it is computed, but is neither sent nor cached; the request's pages are released at once."""
    plain = predict(ask("a", [1, 2, 3], 20), 64).tokens
    count = next(i for i in range(2, 12) if plain[i] not in plain[:i] and (3 + i) % 4 == 3)  # a page is full after it
    fake = decoding(ask("a", [1, 2, 3], 20, stop_token_ids=(plain[count],)))
    while "a" not in fake.finished:
        assert len(fake.plans) == 1
        fake.begin_ahead()
        fake.finish(fake.plans[0])
    assert fake.got["a"].tokens == plain[:count]
    stats = fake.scheduler.stats()
    assert (stats.running, stats.pages_free + stats.pages_cached) == (0, stats.pages_total)
    assert stats.pages_cached == (3 + count) // 4
    assert fake.scheduler.has_work, "the device still computes it"
    assert fake.begin_ahead() is None
    assert fake.finish(fake.plans[0]) == []
    assert not fake.scheduler.has_work
    assert fake.scheduler.stats().pages_cached == stats.pages_cached
    fake.drain()


def test_an_id_may_be_used_again_while_its_last_row_is_computed() -> None:
    plain = predict(ask("a", [1, 2, 3], 20), 64).tokens
    fake = decoding(ask("a", [1, 2, 3], 20, stop_token_ids=(plain[1],)))
    assert fake.begin_ahead()
    (event,) = fake.finish(fake.plans[0])
    assert event.finish == "stop"
    fake.scheduler.submit(ask("a", [9, 9], 2))
    assert not fake.scheduler.counts(fake.plans[0].items[0])
    assert fake.scheduler.commit(fake.plans[0], {}) == []
    fake.scheduler.check()
    assert fake.scheduler.stats().waiting == 1


def test_a_replaced_token_preempts_its_request() -> None:
    """The request is preempted: recurrent states contain the other token and cannot be rolled back."""
    fake = decoding(*pair())
    assert fake.begin_ahead()
    fake.finish(fake.plans[0], replaced=lambda name: name == "a")
    assert [fake.scheduler.counts(item) for item in fake.plans[0].items] == [False, True]
    assert fake.begin_ahead() is None, "a has to be decoded first"
    assert [event.id for event in fake.finish(fake.plans[0])] == ["b"]
    stats = fake.scheduler.stats()
    assert (stats.preemptions, stats.waiting) == (1, 1)
    plan = fake.begin()
    assert plan is not None
    assert [(item.request.id, item.start, item.num_tokens) for item in plan.items] == [("b", 4, 1), ("a", 4, 1)]
    fake.finish(plan)
    fake.drain()


@pytest.mark.parametrize("committed", [False, True])
def test_an_abort_with_two_steps_in_flight(committed: bool) -> None:
    fake = decoding(*pair())
    assert fake.begin_ahead()
    if committed:
        fake.finish(fake.plans[0])
    fake.abort("a")
    while fake.plans:
        assert [event.id for event in fake.finish(fake.plans[0])] == ["b"]
        fake.scheduler.check()
    fake.drain()
