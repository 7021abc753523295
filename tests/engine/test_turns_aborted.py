"""Prompts that are aborted while they are computed in turns with decode steps, alone or in a step with others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.turn_cases import KINDS, ROWS, case_of, decode, planned, prompt
from engines import Loaded, finish_all, request, tokens_of
from proa.engine.turns import PrefillTurns
from proa.machine.cost.turns import GapLimit

pytestmark = pytest.mark.one_table  # a test and a kind of executor


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_prompt_takes_no_more_turns(kind: str, load: Callable[[str, str], Loaded]) -> None:
    case = case_of(load(kind, "qwen3-next"), durations=(1.0, 3.0))
    decode(case, 2, 60)
    case.engine.submit(request("long", prompt(30), 5))
    for _ in range(3):
        case.engine.step()
    assert case.engine.scheduler.beside is not None
    case.engine.abort("long")
    case.engine.step()
    assert case.engine.scheduler.beside is None
    case.engine.submit(request("next", prompt(30, 2), 5))
    events = finish_all(case.engine)
    assert "long" not in events
    assert len(tokens_of(events["next"])) == 5
    plain = case_of(load(kind, "qwen3-next"), turns=False)
    plain.engine.submit(request("next", prompt(30, 2), 5))
    assert tokens_of(finish_all(plain.engine)["next"])[0] == tokens_of(events["next"])[0]
    stats = case.engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next"])
@pytest.mark.parametrize(("left", "stays", "anew"), [(ROWS + 9, 5, False), (ROWS - 4, 4, True), (5, 26, False)])
def test_an_abort_keeps_the_other_prompt_of_the_step(
    kind: str, family: str, left: int, stays: int, anew: bool, load: Callable[[str, str], Loaded]
) -> None:
    """The prefill step goes on for the other request, or is given up if that is a small part of it; the aborted one
    gets no event."""
    model, asked = load(kind, family), request("stays", prompt(stays, 3), 5, prompt_logprobs=1)
    case = case_of(model, durations=(1.0, 3.0))
    decode(case, 1, 60)
    case.engine.submit(request("left", prompt(left), 5, prompt_logprobs=1))
    case.engine.submit(asked)
    while True:
        case.engine.step()
        plan = case.engine.scheduler.beside
        if plan is not None and len(plan.items) == 2:
            break
    case.engine.abort("left")
    case.engine.step()
    now = case.engine.scheduler.beside
    assert now is not None
    assert (now is not plan) == anew
    assert [item.request.id for item in now.items] == (["stays"] if anew else ["left", "stays"])
    case.engine.scheduler.check()
    events = finish_all(case.engine)
    assert "left" not in events
    assert [len(event.prompt_logprobs) for event in events["stays"] if event.prompt_logprobs] == [stays]
    plain = case_of(model, turns=False)
    plain.engine.submit(asked)
    assert tokens_of(events["stays"])[0] == tokens_of(finish_all(plain.engine)["stays"])[0]
    stats = case.engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


@pytest.mark.parametrize(
    ("blocks", "again", "given_up"),
    [(0, 0, True), (0, 7, True), (0, 8, False), (1, 5, True), (1, 6, False), (3, 0, True)],
)
def test_a_step_is_given_up_for_few_tokens(
    blocks: int, again: int, given_up: bool, load: Callable[[str, str], Loaded]
) -> None:
    """For a quarter of the tokens that are left of 30 in three blocks; and always if none of its requests goes on."""
    runner = case_of(load("torch", "qwen3-moe")).engine.runner
    assert len(runner.executor.spec.blocks) == 3
    turns, plan = PrefillTurns(runner, GapLimit(factor=2.0)), planned("long", 30)
    turns.launch(plan)
    for _ in range(blocks):
        turns._done = runner.advance(turns._held[-1], 1)
    assert turns.should_give_up(plan, again) == given_up
    turns.cancel()
