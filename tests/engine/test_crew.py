"""The number of workers for decode: chosen by trial, and only these work then."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import programs
from engines import HEAD_ROWS, Loaded, load_native, run_step
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.crew import TRIALS_S, Crew, Trial, best, choose_few, waited_s
from proa.engine.executors.executor import FEW_TOKENS
from proa.engine.executors.recorded import RecordedExecutor
from proa.native.pool import Pool
from tiny import make_tiny


class Watched(Pool):
    """A pool that records the calls of `use`."""

    def __init__(self, teams: list[list[int]]) -> None:
        super().__init__(teams, pin=False, spin_us=50)
        self.calls: list[tuple[int, ...]] = []

    def use(self, workers: tuple[int, ...]) -> None:  # type: ignore[override]
        super().use(workers)
        self.calls.append(workers)


def trial(workers: int, *milliseconds: float) -> Trial:
    return Trial(workers, tuple(ms / 1e3 for ms in milliseconds))


@pytest.mark.parametrize(
    ("trials", "saving", "workers", "why"),
    [
        ([trial(16, 5, 5.1, 5.2), trial(15, 4.8, 4.8, 4.9), trial(8, 7, 7, 7)], False, 15, "the fastest"),
        ([trial(16, 5, 5.1, 5.2), trial(15, 4.5, 4.6, 4.7), trial(8, 4, 4, 4)], False, 8, "the fastest"),
        ([trial(8, 5, 5, 5), trial(7, 6, 6, 6), trial(16, 4, 4, 4)], False, 16, "the fastest"),
        ([trial(16, 5, 5.1, 5.2), trial(15, 4.9, 4.95, 5)], False, 16, "no other number"),  # too small a gain
        ([trial(16, 5, 5.1, 5.2), trial(15, 4, 5.5, 5.5)], False, 16, "no other number"),  # one lucky round
        ([trial(16, 5, 9, 9), trial(15, 4, 4, 4)], False, 16, "vary too much"),  # other load on the machine
        ([trial(16, 5, 5, 5), trial(8, 5.4, 5.4, 5.4), trial(4, 9, 9, 9)], True, 8, "within 10%"),
        ([trial(16, 5, 5, 5), trial(8, 6, 6, 6), trial(4, 9, 9, 9)], True, 16, "no other number"),
        ([trial(16, 5, 5, 5), trial(15, 4, 4, 4), trial(8, 4.9, 4.9, 4.9)], True, 15, "the fastest"),
        ([trial(8, 5, 5, 5), trial(4, 4.3, 4.3, 4.3), trial(16, 4, 4, 4)], True, 4, "within 10%"),
        ([trial(16, 5, 9, 9), trial(4, 5, 5, 5)], True, 16, "vary too much"),
    ],
)
def test_the_best_number_of_workers(trials: list[Trial], saving: bool, workers: int, why: str) -> None:
    chosen, reason = best(trials, saving=saving)
    assert trials[chosen].workers == workers
    assert why in reason
    assert best(trials, saving=saving, disturbed=0.09) == (chosen, reason)
    assert best(trials, saving=saving, disturbed=0.2) == (0, DISTURBED_20)


DISTURBED_20 = "other programs used these cores for 20% of the time, so times are not reliable"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel has no schedstat")
def test_waiting_for_a_core_is_measured() -> None:
    """Two computing threads on one CPU."""
    mine = os.sched_getaffinity(0)
    code = "while True: pass"
    with subprocess.Popen(programs.python("-c", code)) as other:
        try:
            one = min(mine)
            os.sched_setaffinity(other.pid, {one})
            os.sched_setaffinity(0, {one})
            before, end = waited_s(), time.perf_counter() + 0.2
            while time.perf_counter() < end:
                pass
            assert waited_s() - before > 0.03
        finally:
            os.sched_setaffinity(0, mine)
            other.kill()


class Machine:
    """A clock and steps that take as long as `seconds` says for the workers at work."""

    def __init__(self, pool: Pool, seconds: Callable[[int], float]) -> None:
        self.now_s, self.tokens, self.shares = 0.0, [], set()  # type: ignore[var-annotated]
        self._pool, self._seconds = pool, seconds

    def clock(self) -> float:
        return self.now_s

    def step(self, i: int, share: float) -> None:
        self.now_s += self._seconds(self._pool.threads) * share
        self.tokens.append(i)
        self.shares.add(share)


@pytest.mark.parametrize(
    ("seconds", "few", "row"),
    [
        (
            {4: 0.004, 3: 0.003, 2: 0.005, 1: 0.01},
            (3,),
            ("3 of 4", "the fastest; one-token steps: 4 take 4.00 ms, 3 take 3.00 ms, 2 take 5.00 ms"),
        ),
        (
            {4: 1.0, 3: 1.1, 2: 1.9, 1: 4.0},
            (4,),
            ("4 of 4", "no other number is clearly faster; the first 2% of one-token steps: 4 take 16.67 ms"),
        ),
    ],
)
def test_trials_choose_few_workers(seconds: dict[int, float], few: tuple[int, ...], row: tuple[str, str]) -> None:
    with Watched([[0, 0, 0]]) as pool:
        crew, machine = Crew(pool, (4,)), Machine(pool, lambda threads: seconds[threads])
        got = choose_few(crew, [(4,), (3,), (2,)], machine.step, clock=machine.clock, waited=lambda: 0.0)
        assert (crew.few, crew.many) == (few, (4,))
        assert got is not None
        assert (got.name, got.asked, got.got) == ("threads for decode", "auto", row[0])
        assert got.why.startswith(row[1])
        assert set(pool.calls) == {(3,), (2,), (1,)}
        whole_s = 2 * seconds[4]
        assert machine.now_s <= whole_s + 2 * TRIALS_S  # planned from the first trial; others may be slower


def test_smt_siblings_are_named_if_faster() -> None:
    with Watched([[0, 0, 0]]) as pool:
        crew, machine = Crew(pool, (2,)), Machine(pool, lambda threads: 0.01 / threads)
        got = choose_few(crew, [(2,), (1,), (4,)], machine.step, clock=machine.clock, waited=lambda: 0.0)
        assert got is not None
        assert got.got == "4: SMT siblings beside the 2"
        assert (crew.few, crew.many) == ((4,), (2,))


def test_a_disturbed_trial_changes_nothing() -> None:
    with Watched([[0, 0, 0]]) as pool:
        crew, machine = Crew(pool, (4,)), Machine(pool, lambda threads: 0.01 * threads)
        got = choose_few(crew, [(4,), (2,)], machine.step, clock=machine.clock, waited=lambda: machine.now_s)
        assert got is not None
        assert (got.got, crew.few) == ("4 of 4", (4,))
        assert "other programs" in got.why


def test_one_trial_gives_no_decision() -> None:
    with Watched([[]]) as pool:
        assert choose_few(Crew(pool, (1,)), [(1,)], lambda i, share: None) is None
        assert pool.calls == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3-moe", tmp_path_factory.mktemp("tiny"))


def executor(model: Loaded, crew: Crew) -> RecordedExecutor:
    limits = StepLimits(rows=64, sequences=1, context_tokens=128, page_tokens=16, head_rows=HEAD_ROWS)
    made = model.make(limits, 8)
    assert isinstance(made, RecordedExecutor)
    made.crew = crew
    return made


def logits(run: RecordedExecutor, span: Span) -> torch.Tensor:
    step = run_step(run, StepBatch([span]))
    return run.logits_of(step, range(len(span.tokens))).clone()


def test_few_workers_for_few_tokens_give_the_same_bits(folder: Path) -> None:
    with Watched([[0, 0], [0]]) as pool:
        crew = Crew(pool, (3, 1))
        crew.few = (1, 1)
        run = executor(load_native(folder, pool), crew)
        found = []
        for few in ((1, 1), (3, 1)):
            crew.few = few
            long = logits(run, Span(list(range(40)), 0, [0, 1, 2], 40))
            short = logits(run, Span([7] * FEW_TOKENS, 40, [0, 1, 2, 3], 40))
            found.append((long, short))
        assert pool.calls == [(2, 1), (0, 1), (2, 1)]  # the fourth step uses the workers of the third
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_try_step_leaves_the_cache_intact(folder: Path) -> None:
    with Watched([[0]]) as pool:
        crew = Crew(pool, (2,))
        run = executor(load_native(folder, pool), crew)
        before = logits(run, Span([5, 6, 7], 0, [1], 3))
        for share in (1e-9, 0.5, 1.0):
            run.try_step(9, share)
        assert choose_few(crew, [(2,), (1,)], lambda i, share: run.try_step(i % 256, share)) is not None
        assert torch.equal(logits(run, Span([5, 6, 7], 0, [1], 3)), before)
