"""Thread counts are chosen by trial: the fastest wins, for decode and prefill separately."""

from __future__ import annotations

import time

import pytest
import torch

from engines import HEAD_ROWS, Loaded, load_decoder
from proa.engine.building.threads import STEPS, choose_threads
from proa.engine.executors.batch import StepLimits
from proa.engine.executors.eager import EagerExecutor
from proa.engine.runner import Runner, StepOutput
from proa.engine.scheduling.step_plan import StepPlan
from tiny import make_tiny


class TimedRunner(Runner):
    """Sleeps seconds[tokens, threads] in place of a step."""

    seconds: dict[tuple[int, int], float]
    executor: EagerExecutor

    def run(self, plan: StepPlan) -> StepOutput:
        executor = self.executor
        threads = executor.decode_threads if plan.num_tokens == 1 else executor.prefill_threads
        time.sleep(self.seconds[plan.num_tokens, threads])
        return StepOutput()


class BusyLater(TimedRunner):
    """Another program slows steps down once each of three thread counts had a round of decode steps."""

    steps = 0

    def run(self, plan: StepPlan) -> StepOutput:
        self.steps += 1
        if 3 * (1 + STEPS) < self.steps <= 4 * (1 + STEPS):
            time.sleep(0.1)
        return super().run(plan)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_decoder(make_tiny("qwen3-moe", tmp_path_factory.mktemp("tiny")))


def eager(model: Loaded) -> EagerExecutor:
    executor = model.make(StepLimits(rows=64, sequences=1, context_tokens=128, page_tokens=16, head_rows=HEAD_ROWS), 8)
    assert isinstance(executor, EagerExecutor)
    return executor


@pytest.mark.alone
@pytest.mark.parametrize(
    ("one", "two", "four", "best"),
    [(0.005, 0.02, 0.04, 1), (0.04, 0.005, 0.02, 2), (0.04, 0.02, 0.005, 4), (0.0202, 0.02, 0.02, 1)],
)
def test_the_fastest_wins_for_decode_and_prefill_each(
    model: Loaded, one: float, two: float, four: float, best: int
) -> None:
    executor = eager(model)
    runner = TimedRunner(executor)
    slow_prefill = {(64, 1): 0.02, (64, 2): 0.005, (64, 4): 0.02}
    runner.seconds = {(1, 1): one, (1, 2): two, (1, 4): four, **slow_prefill}
    choose_threads(executor, runner, 4, 64, 16)
    assert (executor.decode_threads, executor.prefill_threads) == (best, 2)


@pytest.mark.alone
def test_a_number_that_was_dropped_is_not_compared_with_a_busier_round(model: Loaded) -> None:
    executor = eager(model)
    runner = BusyLater(executor)
    runner.seconds = {(tokens, threads): 0.005 if threads == 2 else 0.02 for tokens in (1, 64) for threads in (1, 2, 4)}
    choose_threads(executor, runner, 4, 64, 16)
    assert (executor.decode_threads, executor.prefill_threads) == (2, 2)


def test_a_real_runner_can_be_timed(model: Loaded) -> None:
    before = torch.get_num_threads()
    executor = eager(model)
    choose_threads(executor, Runner(executor), 2, 64, 16)
    torch.set_num_threads(before)
    assert {executor.decode_threads, executor.prefill_threads} <= {1, 2}
