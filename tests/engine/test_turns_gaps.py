"""Gaps between decode steps beside a prompt: PrefillTurns with a simulated executor and clock, and their counters."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import request
from proa.engine.executors.executor import Pace
from proa.engine.gaps import DecodeGaps
from proa.engine.scheduling.request import Request
from proa.engine.scheduling.step_plan import StepItem, StepPlan
from proa.engine.turns import STEPS, PrefillTurns
from proa.machine.cost.turns import FIRST_TOKENS, LEAST_ALLOWANCE, LEAST_TOKENS, GapLimit

BLOCKS = 12


class Simulated:
    """A runner and its executor. A decode step takes step_s, a block of a prefill step read_s + tokens * token_s."""

    def __init__(self, step_s: float, read_s: float, token_s: float) -> None:
        self.step_s, self.read_s, self.token_s = step_s, read_s, token_s
        self.now_s, self.block_s, self.lengths = 0.0, 0.0, list[int]()
        self.executor = SimpleNamespace(spec=SimpleNamespace(blocks=range(BLOCKS)), pace=self.pace)

    def pace(self) -> Pace:
        return Pace(self.step_s if self.now_s else 0.0, self.block_s)

    def launch_in_parts(self, plan: Any, share: float = 0.0) -> Any:
        self.block_s = 0.0
        self.lengths.append(plan.num_tokens)
        return SimpleNamespace(plan=plan, left=BLOCKS)

    def runs_beside(self, flight: Any) -> bool:
        return False

    def advance(self, flight: Any, blocks: int) -> bool:
        assert blocks > 0
        blocks = min(blocks, flight.left)
        self.block_s = self.read_s + flight.plan.num_tokens * self.token_s
        self.now_s += blocks * self.block_s
        flight.left -= blocks
        return bool(flight.left == 0)


def gaps_beside(simulated: Simulated, limit: GapLimit, prompt: int, most_gaps: int = 5000) -> list[float]:
    """Gaps between decode steps while a prompt is computed, as the engine does, at most most_gaps."""
    turns = PrefillTurns(simulated, limit)  # type: ignore[arg-type]
    for _ in range(STEPS):
        simulated.now_s += simulated.step_s
        turns.prefill()
    gaps, last_s, left = list[float](), simulated.now_s, prompt
    while (left or turns.busy) and len(gaps) < most_gaps:
        if turns.take() is None and not turns.busy:
            length = min(left, turns.most_tokens or left)
            left -= length
            turns.launch(SimpleNamespace(num_tokens=length))  # type: ignore[arg-type]
        simulated.now_s += simulated.step_s
        turns.prefill()
        gaps.append(simulated.now_s - last_s)
        last_s = simulated.now_s
    return gaps


SECONDS = st.floats(1e-4, 0.5)


@settings(deadline=None)
@given(st.floats(1.05, 6), SECONDS, st.floats(0, 0.3), st.floats(1e-6, 1e-3), st.integers(1, 8000))
def test_no_gap_exceeds_the_limit_if_a_block_fits(
    factor: float, step_s: float, read_s: float, token_s: float, prompt: int
) -> None:
    """Steps grow as far as one of their blocks fits, so prompts also use what the limit leaves them."""
    limit, simulated = GapLimit(factor=factor), Simulated(step_s, read_s, token_s)
    gaps = gaps_beside(simulated, limit, prompt)
    if read_s + LEAST_TOKENS * token_s <= limit.allowance_s(step_s):
        assert max(gaps) <= factor * step_s * (1 + 1e-6)
        assert sum(simulated.lengths) == prompt, "every turn computes a block, so the prompt ends"


@settings(deadline=None)
@given(st.floats(1.05, 6), SECONDS, st.floats(0.001, 0.3), st.floats(1e-6, 1e-3))
def test_long_blocks_keep_the_mean(factor: float, step_s: float, read_s: float, token_s: float) -> None:
    """A block of the shortest step does not fit: the mean of all gaps is within the limit, up to the last block."""
    limit, simulated = GapLimit(factor=factor), Simulated(step_s, read_s, token_s)
    block_s = read_s + LEAST_TOKENS * token_s
    gaps = gaps_beside(simulated, limit, 4 * LEAST_TOKENS)
    if block_s > limit.allowance_s(step_s):
        assert sum(gaps) <= len(gaps) * factor * step_s + 2 * block_s
        assert max(gaps) <= step_s + block_s * (1 + 1e-6), "never two at once"
        most_turns = 4 * BLOCKS * (2 + block_s / limit.allowance_s(step_s))
        assert sum(simulated.lengths) == 4 * LEAST_TOKENS or most_turns > len(gaps) == 5000


def test_steps_are_as_long_as_fits() -> None:
    """One block of each step but the first and the last takes nearly all that the limit leaves."""
    simulated = Simulated(0.02, 0.004, 25e-6)
    gaps = gaps_beside(simulated, GapLimit(factor=2.5), 8000)
    assert simulated.lengths[0] == LEAST_TOKENS
    longest = max(simulated.lengths)
    assert 0.8 * 0.03 <= simulated.read_s + longest * simulated.token_s <= 0.03
    assert max(gaps) <= 0.05
    assert sum(gaps) / len(gaps) > 0.04


def test_without_decode_steps_are_longer() -> None:
    simulated = Simulated(0.02, 0.0, 1e-4)
    turns = PrefillTurns(simulated, GapLimit(factor=2.5))  # type: ignore[arg-type]
    assert turns.most_tokens == FIRST_TOKENS
    turns.launch(SimpleNamespace(num_tokens=FIRST_TOKENS))  # type: ignore[arg-type]
    while turns.take() is None:
        turns.finish()
    assert turns.most_tokens == FIRST_TOKENS, "50 ms a block"
    simulated.now_s += 1
    turns.prefill()
    assert turns.most_tokens == 192, "85 % of 30 ms a block beside decode steps of 20 ms, in multiples of 64 tokens"
    turns.finish()
    assert turns.most_tokens == FIRST_TOKENS


def test_a_short_last_step_teaches_nothing() -> None:
    """It takes nearly as long as a long one: reading weights takes most of its time."""
    simulated = Simulated(0.02, 0.01, 1e-5)
    turns = PrefillTurns(simulated, GapLimit(factor=2.5))  # type: ignore[arg-type]
    most = []
    for length in (FIRST_TOKENS, 20):
        turns.launch(SimpleNamespace(num_tokens=length))  # type: ignore[arg-type]
        while turns.take() is None:
            turns.finish()
        most.append(turns.most_tokens)
    assert most[0] == most[1]


def test_one_slow_decode_step_does_not_raise_the_limit() -> None:
    simulated = Simulated(0.02, 0.0, 1e-4)
    turns = PrefillTurns(simulated, GapLimit(factor=2.5))  # type: ignore[arg-type]
    simulated.now_s = 1.0
    for seconds in (0.02, 0.02, 0.02, 0.5, 0.02):
        simulated.step_s = seconds
        turns.prefill()
        assert turns.limit_s == pytest.approx(0.05)


def test_a_block_that_does_not_fit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gaps = gaps_beside(Simulated(0.02, 0.05, 1e-4), GapLimit(factor=2.5), 3 * LEAST_TOKENS)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "One layer of a prompt takes 62.8 ms, longer than the 30.0 ms that --max-itl leaves" in said
    assert "a decode step of 20.0 ms" in said
    assert "--max-itl 4.2x would keep every gap within it" in said
    assert max(gaps) <= 4.2 * 0.02


def test_blocks_that_fit_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    gaps_beside(Simulated(0.02, 0.01, 1e-5), GapLimit(factor=2.5), 3000)
    gaps_beside(Simulated(0.02, 0.01, 1e-5), GapLimit(seconds=0.06), 3000)
    assert not caplog.records


def test_a_time_below_the_decode_step_is_said_once_and_prompts_advance(caplog: pytest.LogCaptureFixture) -> None:
    simulated = Simulated(0.1, 0.002, 1e-6)
    gaps = gaps_beside(simulated, GapLimit(seconds=0.08), 2 * LEAST_TOKENS)
    assert sum(simulated.lengths) == 2 * LEAST_TOKENS
    assert max(gaps) <= 0.1 * (1 + LEAST_ALLOWANCE) + 1e-9
    (said,) = [record.getMessage() for record in caplog.records]
    assert "--max-itl is 80.0 ms, but a decode step takes 100 ms" in said
    assert "Prompts get 10 % of its time" in said


def step(*items: tuple[str, int, int]) -> StepPlan:
    """A step of items (request, start, tokens) of prompts of 4 tokens."""
    found = []
    for name, start, count in items:
        asked = Request(request(name, [5] * 4, 50), context_tokens=64, page_tokens=4)
        found.append(StepItem(asked, start, count, start + count >= 4))
    return StepPlan(tuple(found))


def test_gaps_are_counted_apart() -> None:
    now = 0.0
    gaps = DecodeGaps(lambda: now)

    def at(time_s: float, *items: tuple[str, int, int], beside: bool = False) -> None:
        nonlocal now
        now = time_s
        gaps.note(step(*items), beside=beside, limit_s=2.5)

    at(0.0, ("a", 0, 4))  # a prompt alone
    at(1.0, ("a", 4, 1))
    at(2.0, ("a", 5, 1))
    got = gaps.stats()
    assert (got.undisturbed, got.undisturbed_seconds, got.beside) == (1, 1.0, 0)
    at(4.0, ("a", 6, 1), beside=True)  # a prompt is computed in turns
    at(7.0, ("b", 0, 4), beside=False)  # its step ends
    at(8.0, ("a", 7, 1), ("b", 4, 1))
    at(9.0, ("a", 8, 1), ("b", 5, 1))
    at(11.0, ("a", 9, 1), ("b", 6, 1), ("c", 0, 4))  # a prompt in the same step
    at(20.0, ("d", 4, 1))  # after a pause, another request: no gap
    got = gaps.stats()
    assert (got.undisturbed, got.undisturbed_seconds) == (2, 2.0)
    assert (got.beside, got.beside_seconds, got.longest_beside_seconds) == (3, 8.0, 4.0)
    assert (got.over_limit, got.limit_seconds) == (1, 2.5)
