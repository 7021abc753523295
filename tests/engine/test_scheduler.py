"""Scheduler: a small scene for each rule of its module docstring, each refusal and each promise of its API."""

from __future__ import annotations

from random import Random

import pytest

from proa.cache.pages import IntegrityError
from proa.engine.scheduling.phases import FixedPhases
from proa.engine.scheduling.step_plan import StepPlan
from proa.errors import ContextLengthExceeded, ProaError, QueueFull, RequestError, ResourceError
from proa.plan.cells import Cells
from scheduler_sim import EOS, FakeEngine, ask, make_limits, predict
from tiers_sim import SimTiers


def engine(num_pages: int = 64, with_cache: bool = True, **limits: int) -> FakeEngine:
    return FakeEngine(make_limits(**limits), num_pages, with_cache)


def shape(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    return [(i.request.id, i.start, i.num_tokens, i.samples) for i in plan.items] if plan else []


def submit_all(fake: FakeEngine, *requests) -> None:
    for request in requests:
        fake.submit(request)


def run(fake: FakeEngine) -> None:
    """Run to the end, but keep the prefix cache (drain empties it)."""
    while fake.scheduler.has_work:
        fake.step()


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "words"),
    [
        (0, 4, RequestError, "no tokens"),
        (4, 0, RequestError, "max_tokens is 0"),
        (60, 5, ContextLengthExceeded, "60 tokens and asks for up to 5 more, 65 together; the context is 64"),
        (80, 1, ContextLengthExceeded, "81 together"),
        (30, 12, ResourceError, "30 tokens and up to 12 more need 11 KV pages of 4 tokens; there are 10"),
    ],
)
def test_impossible_requests_are_refused(prompt: int, max_tokens: int, error: type[ProaError], words: str) -> None:
    fake = engine(num_pages=10)
    with pytest.raises(error, match=words) as caught:
        fake.submit(ask("r", range(prompt), max_tokens))
    assert type(caught.value) is error
    assert caught.value.remedy
    assert not fake.scheduler.has_work


@pytest.mark.parametrize("token", [-1, 2**31])
def test_numbers_that_are_no_tokens_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match="cannot be a token id"):
        engine().submit(ask("r", [1, token]))


@pytest.mark.parametrize("with_cache", [True, False])
def test_the_largest_request_that_fits_runs(with_cache: bool) -> None:
    fake = engine(num_pages=10, with_cache=with_cache)
    fake.submit(ask("r", range(30), 11))  # 40 tokens of KV: the 41st is never computed
    fake.drain()


def test_an_id_is_in_use_until_its_request_has_ended() -> None:
    fake = engine()
    fake.submit(ask("r", [1]))
    with pytest.raises(RequestError, match="'r' is already in use"):
        fake.scheduler.submit(ask("r", [2]))
    fake.drain()
    fake.scheduler.submit(ask("r", [2]))


@pytest.mark.parametrize(
    ("limits", "accepted"),
    [
        ({"max_running": 2, "max_queued": 0}, 2),
        ({"max_running": 2, "max_queued": 3}, 5),
        ({"max_queued_tokens": 10}, 2),
        ({"max_queued_tokens": 4}, 1),  # a longer prompt may wait alone
    ],
)
def test_a_full_queue_refuses(limits: dict[str, int], accepted: int) -> None:
    fake = engine(**limits)
    submit_all(fake, *(ask(f"r{i}", range(5)) for i in range(accepted)))
    with pytest.raises(QueueFull, match="waiting") as caught:
        fake.submit(ask("one too many", range(5)))
    assert caught.value.http_status == 429
    fake.drain()


def test_running_requests_leave_room_in_the_queue() -> None:
    fake = engine(max_running=1, max_queued=1)
    fake.submit(ask("a", range(5), 9))
    fake.step()
    fake.submit(ask("b", range(5)))
    with pytest.raises(QueueFull, match="1 requests are running and 1 are waiting; at most 1 may wait"):
        fake.submit(ask("c", range(5)))


@pytest.mark.parametrize(
    "limits",
    [{"context_tokens": 0}, {"page_tokens": 0}, {"max_running": 0}, {"max_batch_tokens": 1, "lookahead_tokens": 1}],
)
def test_limits_under_which_nothing_runs(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no request can run"):
        make_limits(**limits)


# ---- steps


def test_decodes_come_first_and_chunks_share_the_rest() -> None:
    fake = engine(max_batch_tokens=8)
    fake.submit(ask("a", range(3), 9))
    assert shape(fake.step()) == [("a", 0, 3, True)]
    submit_all(fake, ask("b", range(20, 33)), ask("c", range(40, 43)))
    assert shape(fake.step()) == [("a", 3, 1, True), ("c", 0, 3, True), ("b", 0, 4, False)]
    assert shape(fake.step()) == [("a", 4, 1, True), ("c", 3, 1, True), ("b", 4, 6, False)]
    assert shape(fake.step()) == [("a", 5, 1, True), ("c", 4, 1, True), ("b", 10, 3, True)]
    fake.drain()


def test_short_prompts_take_at_most_half_of_a_step_from_a_long_one() -> None:
    fake = engine(max_batch_tokens=8, max_running=8)
    submit_all(fake, ask("long", range(20, 45), 1), *(ask(f"s{i}", [i, i + 1], 1) for i in range(6)))
    assert shape(fake.step()) == [("s0", 0, 2, True), ("s1", 0, 2, True), ("long", 0, 4, False)]
    assert shape(fake.step()) == [("s2", 0, 2, True), ("s3", 0, 2, True), ("long", 4, 4, False)]
    fake.drain()


@pytest.mark.parametrize(("max_running", "max_batch_tokens", "together"), [(3, 16, 3), (4, 2, 2)])
def test_no_more_requests_run_than_there_are_slots(max_running: int, max_batch_tokens: int, together: int) -> None:
    fake = engine(max_running=max_running, max_batch_tokens=max_batch_tokens)
    submit_all(fake, *(ask(f"r{i}", [i], 30) for i in range(6)))
    for _ in range(8):
        plan = fake.step()
    assert len(shape(plan)) == together
    assert fake.scheduler.stats().running == together
    fake.drain()


def test_priority_then_arrival() -> None:
    fake = engine(max_running=1)
    submit_all(fake, *(ask(name, [i], 2, priority=p) for i, (name, p) in enumerate([("a", 1), ("b", 0), ("c", 0)])))
    fake.drain()
    assert fake.finished == ["b", "c", "a"]


def test_a_request_is_in_one_step_at_a_time() -> None:
    fake = engine()
    fake.submit(ask("a", [1]))
    plan = fake.begin()
    assert plan is not None
    assert fake.scheduler.plan() is None
    for sampled in ({}, {"a": ()}, {"a": (1, 2)}):
        with pytest.raises(ValueError, match="tokens, expected 1 to 1"):
            fake.scheduler.commit(plan, sampled)
    fake.finish(plan)
    with pytest.raises(ValueError, match="not in flight"):
        fake.scheduler.commit(plan, {"a": 1})


def test_an_idle_scheduler_plans_nothing() -> None:
    assert engine().begin() is None


def test_events_tell_how_it_ended() -> None:
    fake = engine()
    request = ask("a", [3, 1], 30, eos_token_ids=(EOS,))
    fake.submit(request)
    fake.drain()
    answer = predict(request, 64)
    assert (answer.finish, answer.stop_token) == ("stop", EOS)
    assert EOS not in answer.tokens


def test_several_tokens_in_one_step() -> None:
    fake = engine(lookahead_tokens=3)
    fake.submit(ask("a", range(5), 10))
    events = []
    while plan := fake.begin():
        events += fake.finish(plan, drafts=3)
    assert [len(e.tokens) for e in events] == [4, 4, 2]
    fake.drain()


# ---- pages


def test_a_page_that_runs_out_is_taken_from_the_last() -> None:
    fake = engine(num_pages=6, with_cache=False)
    submit_all(fake, ask("a", range(7), 14), ask("b", range(8, 15), 14))
    while not fake.scheduler.stats().preemptions:
        plan = fake.step()
    assert [name for name, *_ in shape(plan)] == ["a"]
    assert (fake.scheduler.stats().running, fake.scheduler.stats().waiting) == (1, 1)
    assert len(fake.got["b"].tokens) > 1, "the answer so far is kept"
    fake.submit(ask("c", [1], 1))
    while "c" not in [name for name, *_ in shape(plan)]:
        plan = fake.step()
    assert "b" in [name for name, *_ in shape(plan)], "it is admitted before later arrivals"
    fake.drain()


def test_cached_pages_are_evicted_before_a_preemption() -> None:
    fake = engine(num_pages=12)
    fake.submit(ask("old", range(24), 1))
    run(fake)
    assert fake.scheduler.stats().pages_cached == 6
    submit_all(fake, ask("a", range(30, 37), 16), ask("b", range(40, 47), 16))
    run(fake)
    assert fake.scheduler.stats().preemptions == 0
    fake.drain()


def test_a_better_priority_preempts_a_worse_one() -> None:
    fake = engine(num_pages=8, max_running=2)
    submit_all(fake, *(ask(name, [i], 20, priority=p) for i, (name, p) in enumerate([("a", 1), ("b", 2)])))
    fake.step()
    fake.submit(ask("urgent", range(20), 2, priority=0))
    assert [name for name, *_ in shape(fake.step())] == ["a", "urgent"]
    fake.drain()
    assert fake.finished == ["urgent", "a", "b"]


def test_no_preemption_that_cannot_free_enough_pages() -> None:
    """The pages of all requests of worse priority would not be enough."""
    fake = engine(num_pages=8)
    submit_all(fake, ask("a", range(21), 5), ask("b", [1], 9, priority=2))
    fake.step()
    fake.step()
    fake.submit(ask("c", range(30, 50), 2, priority=1))
    assert [name for name, *_ in shape(fake.step())] == ["a", "b"]
    assert fake.scheduler.stats().preemptions == 0
    fake.drain()
    assert fake.finished == ["a", "c", "b"]


def test_equals_are_not_preempted_for_a_slot() -> None:
    fake = engine(max_running=1)
    submit_all(fake, ask("a", [1], 9), ask("b", [2], 9))
    fake.drain()
    assert fake.scheduler.stats().preemptions == 0
    assert fake.finished == ["a", "b"]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    fake = engine(num_pages=10)
    submit_all(fake, ask("a", range(14), 8), ask("large", range(30, 55), 2), ask("small", [1], 1))
    while "a" not in fake.finished:
        assert [name for name, *_ in shape(fake.step())] == ["a"]
    assert [name for name, *_ in shape(fake.step())] == ["small", "large"], "both have room now"
    fake.drain()


# ---- the prefix cache


def test_a_prompt_is_computed_once() -> None:
    fake = engine()
    for name in "ab":
        fake.submit(ask(name, range(9), 2))
        run(fake)
    assert fake.cached_tokens == {"a": 0, "b": 8}
    stats = fake.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (18, 8, 4)
    fake.drain()


@pytest.mark.parametrize(("prompt", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_prompt_token_is_always_computed(prompt: int, cached: int) -> None:
    fake = engine()
    for name in "ab":
        fake.submit(ask(name, range(prompt), 1))
        run(fake)
    assert fake.cached_tokens["b"] == cached


def test_an_answer_serves_the_next_turn() -> None:
    fake = engine()
    fake.submit(ask("a", range(6), 7))
    run(fake)
    fake.submit(ask("b", [*range(6), *fake.got["a"].tokens, 1, 2, 3], 1))
    fake.step()
    assert fake.cached_tokens["b"] == 12
    fake.drain()


@pytest.mark.parametrize(("wishes", "cached"), [({}, 8), ({"prompt_logprobs": 0}, 0), ({"logprobs": 1}, 8)])
def test_prompt_logprobs_need_the_whole_prompt(wishes: dict[str, int], cached: int) -> None:
    fake = engine()
    submit_all(fake, ask("a", range(9), 1))
    fake.step()
    submit_all(fake, ask("b", range(9), 1, **wishes))
    fake.step()
    assert fake.cached_tokens["b"] == cached
    fake.drain()


def test_a_prompt_that_fills_no_page_uses_its_stored_prefix() -> None:
    """Else a tier evicts the prefix that short questions with short answers have in common."""
    tiers = SimTiers(Random(0), run_pages=2, page_tokens=4)
    fake = FakeEngine(make_limits(), 16, tiers=tiers)
    fake.submit(ask("a", range(17), 1))
    run(fake)
    while fake.scheduler.behind.busy:
        tiers.advance(1.0)
        fake.scheduler.collect()
    runs = list(tiers.stored)
    tiers.touched.clear()
    fake.submit(ask("b", range(17), 1))
    run(fake)
    assert fake.cached_tokens["b"] == 16
    assert tiers.touched == runs[::-1]
    fake.drain()


def test_a_salt_keeps_prefixes_apart() -> None:
    fake = engine()
    for i, salt in enumerate(["x", "y", "x"]):
        request = ask(str(i), range(9), 1)
        fake.submit(type(request)(id=str(i), tokens=request.tokens, sampling=request.sampling, salt=salt))
        fake.step()
    assert list(fake.cached_tokens.values()) == [0, 0, 8]
    fake.drain()


def test_running_requests_share_what_is_computed_so_far() -> None:
    fake = engine(max_batch_tokens=8)
    fake.submit(ask("a", range(20), 9))
    fake.step()
    fake.step()
    fake.submit(ask("b", range(20), 1))
    assert shape(fake.step()) == [("a", 16, 4, True), ("b", 16, 4, True)]
    fake.drain()


def test_siblings_wait_for_the_first_prompt() -> None:
    fake = engine(max_running=8)
    submit_all(fake, *(ask(f"r{i}", range(21), 3, group="g") for i in range(4)), ask("other", [7], 5))
    assert shape(fake.step()) == [("other", 0, 1, True), ("r0", 0, 15, False)]
    assert shape(fake.step()) == [("other", 1, 1, True), ("r0", 15, 6, True)]
    assert [i[:2] for i in shape(fake.step())] == [
        ("r0", 21), ("other", 2), ("r1", 20), ("r2", 20), ("r3", 20)
    ]  # fmt: skip
    fake.drain()
    assert fake.scheduler.stats().cached_prompt_tokens == 60


@pytest.mark.parametrize("cause", ["abort", "preempt"])
def test_siblings_do_not_wait_for_an_aborted_request(cause: str) -> None:
    fake = engine(num_pages=10)
    submit_all(fake, *(ask(f"r{i}", range(30), 3, group="g", priority=1) for i in range(2)))
    fake.step()
    if cause == "abort":
        fake.abort("r0")
    else:
        fake.submit(ask("urgent", range(31, 60), 1, priority=0))
    fake.drain()
    assert fake.finished[-1] == "r1"


def test_siblings_do_not_wait_without_a_cache() -> None:
    fake = engine(with_cache=False)
    submit_all(fake, *(ask(f"r{i}", range(8), 3, group="g") for i in range(2)))
    assert shape(fake.step()) == [("r0", 0, 8, True), ("r1", 0, 8, True)]


# ---- endings


@pytest.mark.parametrize("when", ["waiting", "running", "in flight", "prefilling in flight"])
def test_abort_frees_everything(when: str) -> None:
    fake = engine(max_running=1, max_batch_tokens=8)
    submit_all(fake, ask("a", range(20 if "prefilling" in when else 8), 9), ask("b", range(9), 9))
    fake.step()
    plan = fake.begin() if "in flight" in when else None
    victim = "b" if when == "waiting" else "a"
    fake.abort(victim)
    assert victim in fake.aborted
    assert not fake.scheduler.abort(victim)
    if plan:
        fake.finish(plan)
    fake.scheduler.check()
    fake.drain()
    assert fake.finished == ["a" if victim == "b" else "b"]


def test_aborting_an_unknown_id() -> None:
    assert not engine().scheduler.abort("unknown")


def test_an_aborted_item_needs_no_result() -> None:
    """The runner has no token either for a request whose logits were non-finite."""
    fake = engine()
    submit_all(fake, ask("a", [1], 3), ask("b", [2], 3))
    plan = fake.begin()
    assert plan is not None
    fake.abort("a")
    assert [e.id for e in fake.scheduler.commit(plan, {"b": 5})] == ["b"]
    fake.scheduler.check()


def test_stats() -> None:
    fake = engine(num_pages=8, max_running=1)
    submit_all(fake, ask("a", range(9), 2), ask("b", range(9), 2))
    fake.step()
    stats = fake.scheduler.stats()
    assert (stats.running, stats.waiting, stats.pages_total, stats.pages_free, stats.pages_cached) == (1, 1, 8, 5, 0)
    fake.step()
    stats = fake.scheduler.stats()
    assert (stats.running, stats.waiting, stats.pages_free, stats.pages_cached, stats.steps) == (0, 1, 6, 2, 2)
    fake.drain()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.allocator.alloc(1), "known holders"),
        (lambda f: f.scheduler._running.last.pages.append(60), "known holders"),
        (lambda f: f.scheduler._running.last.pages.reverse(), "its path in the prefix cache"),
        (lambda f: setattr(f.scheduler._running.last, "num_computed", 13), "has 3 pages, too few"),
        (lambda f: setattr(f.scheduler._running.last, "num_computed", 10), "runs but has no token left"),
        (lambda f: f.scheduler._running.remove(f.scheduler._running.last), "known holders"),
    ],
)
def test_check_detects_damage(damage, message: str) -> None:
    fake = engine()
    fake.submit(ask("a", range(9), 5))
    fake.step()
    fake.scheduler.check()
    damage(fake)
    with pytest.raises(IntegrityError, match=message):
        fake.scheduler.check()


def test_a_page_is_not_shared_by_two_cells_that_begin_with_it() -> None:
    """The bits of a row may depend on all rows of its cell."""
    fake = FakeEngine(make_limits(), 16, phases=FixedPhases(Cells(8)), turns=True)
    for name, last in (("a", 2), ("b", 3), ("a again", 2)):
        fake.submit(ask(name, [1, 1, 1, 1, *[last] * 4, 5], 4))
        run(fake)
    assert fake.cached_tokens == {"a": 0, "b": 0, "a again": 8}
    fake.drain()
