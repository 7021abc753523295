"""Copies of recurrent states in the plan: their number, the memory they leave, their rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from proa.config.options import CacheOptions
from proa.errors import ResourceError, UsageError
from proa.plan.plan import Plan
from unit import test_resolve as on_cpu
from unit import test_vram as on_gpu
from unit.plan_cases import DEMO, GIB, NEXT, row

EACH = NEXT.state_bytes_per_sequence(2)


def plan(free_gib: float = 190, **asked: Any) -> Plan:
    return on_cpu.plan(NEXT, on_cpu.machine(free_gib, 192), **asked)


@pytest.mark.parametrize("max_running", [1, 3, 16])
def test_four_copies_per_running_request(max_running: int) -> None:
    got = plan(max_running=max_running)
    assert (got.prefix_cache, got.state_copies, got.state_slots) == (True, 4 * max_running, 5 * max_running)
    assert got.memory.states_bytes == 5 * max_running * EACH
    assert row(got, "copies of states")[1].endswith(f": {4 * max_running} of 73.7 MiB")
    assert row(got, "prefix cache")[:2] == ("on", "on")


def test_copies_are_in_vram_with_the_states() -> None:
    got = on_gpu.plan(on_gpu.NEXT, on_gpu.machine(112, on_gpu.gpu(80)))
    on = on_gpu.check(got, on_gpu.NEXT)
    assert (got.state_copies, on.vram.states_bytes, got.memory.states_bytes) == (16, 20 * EACH, 0)


def test_fewer_copies_with_little_memory() -> None:
    """152.5 GiB hold the model in bfloat16 with states of 4 requests and the least context, and little more."""
    got = plan(152.5)
    assert 0 < got.state_copies < 16
    assert got.prefix_cache
    least = plan(151)
    assert (least.state_copies, least.prefix_cache) == (0, False)
    assert row(least, "prefix cache")[:2] == ("on", "off")
    assert row(least, "copies of states") == ("auto", "none", "no room for one: it takes 73.7 MiB")


@settings(max_examples=examples(60), deadline=None)
@given(free_gib=st.floats(149, 156), context=st.none() | st.integers(1, 20000), kv_memory=st.none() | st.just(GIB))
def test_copies_never_cause_a_refusal(free_gib: float, context: int | None, kv_memory: int | None) -> None:
    asked = {"context": context, "kv_memory": kv_memory}
    with_copies, without = (
        on_cpu.plan_or_refusal(NEXT, on_cpu.machine(free_gib, 192), {**asked, "prefix_cache": on})
        for on in (True, False)
    )
    assert isinstance(with_copies, Plan) == isinstance(without, Plan)
    if isinstance(with_copies, Plan):
        memory = with_copies.memory
        parts = memory.process_bytes + memory.weights_bytes + memory.loading_bytes + memory.kv_bytes
        assert parts + memory.workspace_bytes + memory.states_bytes <= memory.usable_bytes


@settings(max_examples=examples(30), deadline=None)
@given(vram_gib=st.floats(6, 100), ram_gib=st.floats(60, 170), experts=st.sampled_from(["auto", "64", "none"]))
def test_copies_never_keep_a_model_off_the_gpu(vram_gib: float, ram_gib: float, experts: str) -> None:
    with_copies, without = (
        on_gpu.plan_or_refusal(
            on_gpu.NEXT,
            on_gpu.machine(ram_gib, on_gpu.gpu(vram_gib)),
            {"prefix_cache": on, "gpu_experts": experts, "gpu": "0"},
        )
        for on in (True, False)
    )
    assert isinstance(with_copies, Plan) == isinstance(without, Plan)
    if isinstance(with_copies, Plan):
        on_gpu.check(with_copies, on_gpu.NEXT)


def test_state_memory_sets_the_number() -> None:
    got = plan(state_memory=5 * EACH + 1)
    assert (got.state_copies, got.memory.states_bytes) == (5, 9 * EACH)
    assert row(got, "copies of states")[0] == "368 MiB"
    with pytest.raises(UsageError, match=r"--state-memory .* holds no copy") as refused:
        plan(state_memory=EACH - 1)
    assert "--state-memory 74M" in refused.value.remedy
    with pytest.raises(ResourceError, match=r"copies of states 40\.0 GiB") as short:
        plan(state_memory=40 * GIB + EACH)
    assert "lower --state-memory" in short.value.remedy.lower()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, None),
        ({"state_memory": GIB}, ("1.00 GiB", "none", "the model has no recurrent states")),
    ],
)
def test_models_without_states_have_none(asked: dict[str, int], says: tuple[str, str, str] | None) -> None:
    got = on_cpu.plan(DEMO, on_cpu.machine(6), **asked)
    rows = [(d.asked, d.got, d.why) for d in got.decisions if d.name == "copies of states"]
    assert rows == ([says] if says else [])
    assert (got.state_copies, got.prefix_cache) == (0, True)


def test_no_copies_without_a_prefix_cache() -> None:
    got = plan(prefix_cache=False, state_memory=GIB)
    assert (got.state_copies, got.prefix_cache, got.memory.states_bytes) == (0, False, 4 * EACH)
    assert row(got, "copies of states") == ("1.00 GiB", "none", "the prefix cache is off")
    assert row(got, "prefix cache") == ("off", "off", "as asked")
    assert CacheOptions().state_memory is None
