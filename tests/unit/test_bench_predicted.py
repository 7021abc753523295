"""Predicted figures of `proa bench serve` and `proa bench restart`: turns of prompts and decode, cached prefixes."""

from __future__ import annotations

import pytest

from proa.bench.predicted import predicted_restart, predicted_throughput, rates_used
from proa.config.options import EngineOptions, GpuOptions, ModelOptions, SchedulerOptions
from proa.plan.plan import Plan
from proa.plan.predict import decode, prefill
from proa.plan.speeds import Speed, Speeds
from proa.plan.work import Work, planned_work
from quick_plan import prepare
from tiny import make_tiny

SPEEDS = Speeds(ram=Speed(per_s=40e9, source="test"), cpu=Speed(per_s=4e11, source="test"))
ASKED = EngineOptions(
    model=ModelOptions(dtype="bfloat16"), gpus=GpuOptions(gpu="none"), scheduler=SchedulerOptions(max_running=4)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Work]:
    prepared = prepare(str(make_tiny("qwen3-moe", tmp_path_factory.mktemp("model"))), ASKED)
    return prepared.plan, planned_work(prepared.plan, ASKED.model, prepared.declared, prepared.checkpoint)


@pytest.mark.parametrize(
    ("requests", "concurrency", "steps"),
    [
        (8, 4, {4: 2}),
        (9, 4, {4: 2, 1: 1}),
        (3, 8, {3: 1}),  # no more than there are
        (8, 100, {4: 2}),  # --max-running
        (2, 1, {1: 2}),
    ],
)
def test_prompts_and_decode_take_turns(
    model: tuple[Plan, Work], requests: int, concurrency: int, steps: dict[int, int]
) -> None:
    plan, work = model
    found = predicted_throughput(
        plan, work, SPEEDS, requests=requests, concurrency=concurrency, input_tokens=32, output_tokens=9
    )
    prompt = prefill(plan, work, SPEEDS, 32)
    decode_s = sum(rounds * decode(plan, work, SPEEDS, 36, count).seconds for count, rounds in steps.items())
    assert found == {
        "predicted_output_tokens_per_s": pytest.approx(9 * requests / (requests * prompt.seconds + 8 * decode_s)),
        "predicted_decode_tokens_per_s": pytest.approx(decode(plan, work, SPEEDS, 36, max(steps)).tokens_per_s),
        "predicted_prefill_tokens_per_s": pytest.approx(prompt.tokens_per_s),
    }


def test_a_restored_prompt_takes_the_restore_and_a_hit(model: tuple[Plan, Work]) -> None:
    plan, work = model
    found = predicted_restart(plan, work, SPEEDS, prefix_tokens=64, suffix_tokens=16, restore_s=0.5)
    hit_ms = 1e3 * prefill(plan, work, SPEEDS, 16, 64).seconds
    assert found == {
        "predicted_computed_ttft_ms": pytest.approx(1e3 * prefill(plan, work, SPEEDS, 80).seconds),
        "predicted_restored_ttft_ms": pytest.approx(500 + hit_ms),
        "predicted_hit_ttft_ms": pytest.approx(hit_ms),
    }


def test_a_cached_prefix_is_read_but_not_computed(model: tuple[Plan, Work]) -> None:
    plan, work = model
    alone, behind, whole = (prefill(plan, work, SPEEDS, *lengths).seconds for lengths in ((16,), (16, 64), (80,)))
    assert alone < behind < whole


def test_the_rates_used_are_told() -> None:
    assert rates_used(SPEEDS) == {"ram_bytes_per_s": 40e9, "cpu_flops_per_s": 4e11}
