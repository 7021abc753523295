"""What the rates of prompts learn from a pass, and what they must not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.passes import Load, passed, spans
from hybrid_engines import Kept, Split
from proa.engine.executors.batch import StepBatch
from proa.engine.executors.executor import Executor
from proa.hybrid.pass_rates import after_layer, after_no_job, after_pass
from proa.hybrid.pass_state import Pass
from proa.hybrid.pass_totals import OWN, Times
from proa.hybrid.ring import Group
from proa.hybrid.streaming import Streaming
from proa.machine.cost.prefill import CpuExpertCost, Division, PrefillRates
from proa.native.doorbell import NOTHING_COUNTED, Counters
from teacher_forced import prompts

WHOLE = 1 << 22  # bytes of a ring that holds all experts of two layers
MIB = 1 << 20
TRIAL = CpuExpertCost(5e-5, 2e-6)
RATES = PrefillRates(50e9, TRIAL)


def counted(jobs: int, moe_s: float) -> Counters:
    """Jobs of 10 experts of 8 tokens each."""
    return replace(NOTHING_COUNTED, jobs=jobs, moe_s=moe_s, experts=10 * jobs, pairs=80 * jobs)


def with_layers(count: int, at: int, **fields: Any) -> Pass:
    """A pass of so many layers that are groups of their own, of which the one at `at` is under way."""
    groups = [Group(layer, 0, 1, []) for layer in range(count)]
    return Pass(100, 1, groups, [Division(0, 0.0, 1e-3)] * count, NOTHING_COUNTED, at=at, **fields)


def test_the_first_job_of_a_pass_is_not_learned_from() -> None:
    """The workers wake up for it."""
    for at, learned in ((1, False), (2, True), (3, True)):
        one = with_layers(4, at, jobs=counted(at, 1.0))
        rates = after_layer(RATES, one, MIB, counted(at + 1, 1.002))
        assert (rates != RATES) == learned, at
    twice = with_layers(4, 2, jobs=counted(2, 1.0))
    assert after_layer(RATES, twice, MIB, counted(4, 1.002)) == RATES, "a decode step had a job in between"


def test_the_cost_of_counted_experts_is_measured_in_each_pass() -> None:
    """Left to the CPU are those with few tokens: as if all were alike, its jobs seem to cost less than they do."""
    one, rates = with_layers(4, 4), RATES
    took_s = 4 * TRIAL.scaled(1.3).seconds(10, 80)
    for _ in range(12):
        rates = after_pass(rates, one, Times(0.0, 0.0, 0.0, 0.0, 0.0), counted(4, took_s))
    assert rates.counted_cpu.expert_s == pytest.approx(1.3 * TRIAL.expert_s, rel=0.01)
    assert rates.counted_cpu.pair_s == pytest.approx(1.3 * TRIAL.pair_s, rel=0.01)
    assert rates.cpu.expert_s != pytest.approx(1.3 * TRIAL.expert_s, rel=0.1), "the divisions foresaw other jobs"


class OnDevice:
    """A mark, or a copy of one second, that the device reaches at a time of its clock, in seconds."""

    now = 0.0

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    @property
    def passed(self) -> bool:
        return self._at_s <= OnDevice.now

    def seconds_since(self, earlier: OnDevice) -> float:
        assert min(self.passed, earlier.passed), "the driver refuses it"
        return self._at_s - earlier._at_s

    def seconds(self) -> float | None:
        return 1.0 if self.passed else None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=12), st.lists(st.integers(0, 120)))
def test_times_are_added_up_while_the_pass_runs(parts: list[tuple[int, int]], looks: list[int]) -> None:
    """Whenever the host looks, the sums at the end are those of all marks and copies."""
    at_s = list(itertools.accumulate((took for _, took in parts), initial=0))
    one = with_layers(1, 0)
    one.marks.extend(zip((OWN, *(what for what, _ in parts)), map(OnDevice, at_s), strict=True))
    one.arriving.extend(map(OnDevice, at_s))  # type: ignore[arg-type]
    for look in sorted(looks):
        OnDevice.now = look
        one.add_up()
        assert sum(one.times) == max([at for at in at_s if at <= look], default=0)
        assert one.copy_s == sum(at <= look for at in at_s)
        assert one.marks, "a fetch waits for the last mark"
    OnDevice.now = 200.0
    one.add_up()
    assert one.times == Times(*(sum(took for what, took in parts if what == of) for of in range(5)))
    assert (len(one.marks), len(one.arriving)) == (1, 0)


@pytest.mark.parametrize("factor", [1.5, 4.0, 8.0])
def test_a_cost_measured_too_high_is_measured_again(factor: float) -> None:
    """At 8 times its cost the CPU gets none of 128 experts of 100 tokens; a few passes later it gets some."""
    one, rates = with_layers(1, 0), PrefillRates(50e9, TRIAL.scaled(factor))
    for _ in range(20):
        rates = after_no_job(rates, TRIAL, one, 128, 9 * MIB, 8.0)
    assert rates.cpu.expert_s == pytest.approx(TRIAL.expert_s, rel=0.05)
    assert rates.cpu.pair_s == pytest.approx(TRIAL.pair_s, rel=0.05)


def test_prompts_that_the_cpu_is_too_slow_for_teach_nothing() -> None:
    """Long ones: the CPU got no expert by its trial either, so the cost that short ones have measured is kept."""
    rates, long = PrefillRates(50e9, TRIAL.scaled(1.5)), replace(with_layers(1, 0), tokens=65536)
    assert after_no_job(rates, TRIAL, long, 128, 9 * MIB, 8.0) == rates


@pytest.fixture
def engine(load: Load) -> tuple[Executor[Any], Streaming]:
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.25, prefill="auto", ring_bytes=WHOLE), "host", rows=100, keep=keep)
    streaming = keep[0].hybrid.streaming
    assert streaming is not None
    return executor, streaming


def test_the_gpus_times_are_those_of_usual_passes(
    engine: tuple[Executor[Any], Streaming], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a length's first passes, which load kernels and capture graphs; nor of one that tries the routing and goes
    on without it."""
    monkeypatch.setattr("proa.hybrid.streaming.routing_gain_s", lambda *_: -1.0)
    executor, streaming = engine
    learned, batch = list[bool](), StepBatch(spans(prompts([30])))
    for _ in range(6):  # op by op, capturing, trying the routing, replayed
        streaming.rates = PrefillRates(1e9, CpuExpertCost(1e-5, 1e-7))
        passed(executor, batch)
        learned.append(bool(streaming.rates.gpu_s))
    assert learned == [False, False, False, True, True, True]
    streaming.rates = PrefillRates(1e9, CpuExpertCost(1e-5, 1e-7))
    passed(executor, StepBatch(spans(prompts([90]))))
    assert not streaming.rates.gpu_s, "the first pass of another length"


def test_no_noise_keeps_the_cpu_without_experts(engine: tuple[Executor[Any], Streaming]) -> None:
    """Its cost was measured far too high, so that all experts are copied: later passes measure it again."""
    executor, streaming = engine
    streaming.probed_layers = 0
    streaming._trial = CpuExpertCost(1e-6, 1e-9)
    streaming.rates = PrefillRates(1e6, streaming._trial.scaled(1e6))
    batch, left = StepBatch(spans(prompts([30]))), list[int]()
    for _ in range(40):
        streaming.rates = replace(streaming.rates, copy_bytes_per_s=1e6)  # slow, for experts so small
        before = streaming.totals.left_to_cpu
        passed(executor, batch)
        left.append(streaming.totals.left_to_cpu - before)
    assert left[0] == 0, "the CPU's cost is not too high"
    assert max(left) > 0
