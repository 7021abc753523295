"""Copies of recurrent states: where requests go on from, where prompts are cut for it, what becomes of copies. The fake
engine keeps states by slots and notices any that is not its sequence's."""

from __future__ import annotations

import pytest

from proa.engine.scheduling.copying import CopyRules
from proa.engine.scheduling.request import NO_SLOT
from scheduler_sim import FakeEngine, ask, make_limits

PROMPT = list(range(1, 31))  # 7 pages of 4, and 2 tokens


def engine(
    copies: int = 8, num_pages: int = 64, every: int = 4, cut: int = 8, asking: int = 1, least: int = 1, **limits: int
) -> FakeEngine:
    rules = CopyRules(every, cut, asking)
    return FakeEngine(make_limits(**limits), num_pages, copies=copies, rules=rules, least_tokens=least)


def run(fake: FakeEngine, *requests: tuple[str, list[int], int]) -> list[list[tuple[str, int, int]]]:
    """Run to the end, but keep the prefix cache. Returns the items that each step computed."""
    for name, tokens, answer in requests:
        fake.submit(ask(name, tokens, answer))
    steps = []
    while fake.scheduler.has_work:
        plan = fake.step()
        assert plan is not None
        fake.scheduler.check()
        steps.append([(item.request.id, item.start, item.num_tokens) for item in plan.items])
    return steps


def depths(fake: FakeEngine) -> list[int]:
    """Numbers of tokens after which copies exist."""
    assert fake.copies is not None
    return sorted(4 * node.depth for node in fake.copies.nodes)  # type: ignore[attr-defined]


def test_the_same_prompt_again() -> None:
    fake = engine(max_batch_tokens=64)
    assert run(fake, ("a", PROMPT, 1)) == [[("a", 0, 28)], [("a", 28, 2)]]
    assert run(fake, ("b", PROMPT, 1)) == [[("b", 28, 2)]]
    assert fake.cached_tokens == {"a": 0, "b": 28}
    assert fake.scheduler.stats().cached_prompt_tokens == 28
    fake.drain()


def test_steps_of_prompts_end_where_pages_do() -> None:
    fake = engine(max_batch_tokens=11)
    assert run(fake, ("a", PROMPT, 1)) == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 8)], [("a", 24, 6)]]
    assert depths(fake) == [8, 16, 24]
    fake.drain()


def test_an_answer_serves_the_next_turn() -> None:
    fake = engine(max_batch_tokens=64)
    run(fake, ("a", PROMPT, 12))
    run(fake, ("b", [*PROMPT, *fake.got["a"].tokens, 1, 2, 3], 1))
    assert fake.cached_tokens["b"] == 40, "30 and 11 tokens are computed: 10 pages"
    fake.drain()


@pytest.mark.parametrize(("asking", "cached"), [(1, 0), (3, 24)])
def test_the_copy_precedes_what_a_template_omits(asking: int, cached: int) -> None:
    fake = engine(asking=asking, max_batch_tokens=64)
    run(fake, ("a", PROMPT[:29], 9))
    run(fake, ("b", [*PROMPT[:27], 9, 9, 9, 9, 9], 1))
    assert fake.cached_tokens["b"] == cached, "the first two turns have 27 tokens in common, of 29"
    fake.drain()


@pytest.mark.parametrize("tokens", range(24, 29))
def test_the_copy_precedes_the_last_chunk(tokens: int) -> None:
    """The last chunk has at least 5 tokens, so the same prompt cannot use a copy 4 tokens before its end."""
    fake = engine(asking=4, least=5, max_batch_tokens=64)
    run(fake, ("a", PROMPT[:tokens], 1))
    run(fake, ("b", PROMPT[:tokens], 1))
    assert fake.cached_tokens["b"] == (tokens - 5) // 4 * 4
    fake.drain()


@pytest.mark.parametrize(("cut", "steps"), [(28, 2), (29, 1)])
def test_a_short_prompt_is_not_cut(cut: int, steps: int) -> None:
    fake = engine(cut=cut, max_batch_tokens=64)
    assert len(run(fake, ("a", PROMPT, 1))) == steps
    fake.drain()


def test_decode_leaves_copies_where_pages_end() -> None:
    fake = engine(every=8, cut=100, max_batch_tokens=64)
    run(fake, ("a", PROMPT, 21))
    assert depths(fake) == [32, 40, 48]
    fake.drain()


def test_a_branch_gets_a_copy_when_a_request_takes_it() -> None:
    fake = engine(max_batch_tokens=64)
    run(fake, ("a", [*PROMPT[:20], 1, 2, 3, 4, 5], 1))
    assert run(fake, ("b", [*PROMPT[:20], 6, 7, 8, 9, 10], 1))[0] == [("b", 0, 20)]
    assert run(fake, ("c", [*PROMPT[:20], 3, 3], 1)) == [[("c", 20, 2)]]
    assert fake.cached_tokens == {"a": 0, "b": 0, "c": 20}
    fake.drain()


def test_two_running_requests_continue_from_one_copy() -> None:
    fake = engine(max_batch_tokens=64)
    run(fake, ("a", PROMPT, 1))
    steps = run(fake, ("b", [*PROMPT[:28], 7, 7], 9), ("c", [*PROMPT[:28], 8], 9))
    assert steps[0] == [("b", 28, 2), ("c", 28, 1)]
    fake.drain()


def test_siblings_wait_for_a_prompt_that_leaves_a_copy() -> None:
    fake = engine(max_batch_tokens=64)
    for i in range(3):
        fake.submit(ask(f"r{i}", PROMPT, 3, group="g"))
    steps = run(fake)
    assert steps[:2] == [[("r0", 0, 28)], [("r0", 28, 2), ("r1", 28, 2), ("r2", 28, 2)]]
    fake.drain()


def test_siblings_of_short_prompts_wait_for_nothing() -> None:
    fake = engine(cut=29, max_batch_tokens=64)
    for i in range(2):
        fake.submit(ask(f"r{i}", PROMPT, 3, group="g"))
    assert run(fake)[0] == [("r0", 0, 30), ("r1", 0, 30)]


def test_a_preempted_request_continues_from_its_last_copy() -> None:
    fake = engine(num_pages=14, max_batch_tokens=64)
    fake.submit(ask("a", PROMPT[:20], 22, priority=1))
    for _ in range(12):
        fake.step()
    fake.submit(ask("urgent", PROMPT[:5:-1], 2, priority=0))
    steps = run(fake)
    assert fake.scheduler.stats().preemptions == 1
    starts = [start for step in steps for name, start, _ in step if name == "a"]
    assert 20 <= starts[0] < 31, "31 tokens were computed; the last pages went to the other request"
    fake.drain()


def test_an_abort_during_prefill_keeps_the_computed_prefix() -> None:
    fake = engine(max_batch_tokens=8)
    fake.submit(ask("a", PROMPT, 5))
    fake.step()
    plan = fake.begin()
    assert plan is not None
    fake.abort("a")
    fake.finish(plan)
    fake.scheduler.check()
    assert depths(fake) == [8], "the aborted step leaves no copy"
    run(fake, ("b", PROMPT, 1))
    assert fake.cached_tokens["b"] == 8
    fake.drain()


def test_one_slot_of_copies_is_enough() -> None:
    fake = engine(copies=1, max_batch_tokens=64)
    run(fake, ("a", PROMPT, 9), ("b", PROMPT[::-1], 9))
    assert len(depths(fake)) == 1
    run(fake, ("c", PROMPT, 1), ("d", PROMPT[::-1], 1))
    fake.drain()


def test_the_oldest_conversations_copy_is_evicted_first() -> None:
    fake = engine(copies=2, cut=28, every=28, max_batch_tokens=64)
    prompts = {name: [start, *PROMPT[1:]] for start, name in enumerate("abc")}
    for name in "abc":
        run(fake, (name, prompts[name], 1))
    for name, cached in (("b", 28), ("c", 28), ("a", 0)):
        run(fake, (f"{name} again", prompts[name], 1))
        assert fake.cached_tokens[f"{name} again"] == cached
    fake.drain()


def test_copies_in_passing_go_before_those_at_a_prompts_end() -> None:
    fake = engine(copies=3, max_batch_tokens=64)
    run(fake, ("a", PROMPT, 26))
    assert depths(fake)[0] == 28, "of the answer only the last copies are left"
    assert depths(fake)[-1] == 52
    fake.drain()


def test_a_step_ahead_of_one_that_ended_leaves_no_copy() -> None:
    fake = engine(max_batch_tokens=64)
    fake.submit(ask("a", PROMPT[:5], 30))
    fake.submit(ask("b", PROMPT[:6], 30))
    fake.step()
    fake.step()
    assert fake.begin()  # computes a's token 6 and b's 7: after it b has two full pages
    assert fake.begin_ahead()  # and a's 7
    copied = [[item.copy_to >= 0 for item in plan.items] for plan in fake.plans]
    assert copied == [[False, True], [True, False]]
    fake.finish(fake.plans[0])
    fake.abort("a")
    fake.scheduler.check()
    fake.finish(fake.plans[0])
    fake.scheduler.check()
    assert depths(fake) == [8]
    fake.drain()


def test_a_replaced_token_leaves_no_copy() -> None:
    fake = engine(max_batch_tokens=64)
    fake.submit(ask("a", PROMPT[:5], 20))
    fake.step()
    fake.step()
    assert fake.begin()
    assert fake.begin_ahead()
    fake.finish(fake.plans[0], replaced=lambda name: True)
    fake.finish(fake.plans[0])
    assert depths(fake) == []
    fake.scheduler.check()
    fake.drain()


def test_a_step_ahead_of_a_requests_last_one_takes_no_slot() -> None:
    fake = engine(max_batch_tokens=64)
    fake.submit(ask("a", PROMPT[:5], 3))
    fake.submit(ask("b", PROMPT[:6], 30))
    fake.step()
    fake.step()
    assert fake.begin()
    plan = fake.begin_ahead()
    assert plan is not None
    (item,) = [item for item in plan.items if item.request.id == "a"]
    assert (item.start + item.num_tokens, item.copy_to) == (8, NO_SLOT), "its eighth token is never computed"
    while fake.plans:
        fake.finish(fake.plans[0])
    fake.drain()
