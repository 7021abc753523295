"""The division of a layer's experts between copies to the GPU and the CPU, against brute force and wrong rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.machine.cost.prefill import (
    ABOUT,
    LONGER,
    CpuExpertCost,
    GpuCost,
    PrefillRates,
    divide,
    divisions,
    fitted_cost,
)

MIB = 1 << 20
RATES = st.builds(
    PrefillRates,
    st.floats(1e9, 6e10),
    st.builds(CpuExpertCost, st.floats(1e-6, 1e-2), st.floats(1e-8, 1e-3)),
)


@given(st.integers(1, 256), st.integers(1, 50), st.integers(1, 70_000), st.integers(1, 8), RATES, st.integers(1, 16))
def test_no_other_division_is_faster(
    experts: int, mib: int, tokens: int, top_k: int, rates: PrefillRates, jobs: int
) -> None:  # fmt: skip
    got = divide(experts, mib * MIB, tokens, min(top_k, experts), rates, jobs=jobs)
    ends_s = max(got.copies_s, got.cpu_s)
    for other in divisions(experts, mib * MIB, tokens, min(top_k, experts), rates, jobs):
        assert ends_s <= max(other.copies_s, other.cpu_s) * (ABOUT + 1e-9)


def test_few_tokens_are_the_cpus_and_many_the_gpus() -> None:
    """Qwen3-30B-A3B in bfloat16 on an H200 with AMX: 9.4 MB an expert, PCIe 55 GB/s, RAM 200 GB/s."""
    rates = PrefillRates(55e9, CpuExpertCost(47e-6, 1.6e-6))
    streamed = [divide(128, 9_437_184, tokens, 8, rates).streamed for tokens in (1, 128, 2048, 16384, 65536)]
    assert streamed == sorted(streamed)
    assert streamed[0] <= 20
    assert streamed[-1] >= 120


@given(RATES, st.sampled_from([128, 512, 2048]), st.floats(0.7, 1.3), st.floats(0.7, 1.3))
def test_rates_that_are_30_percent_off_cost_little(
    rates: PrefillRates, tokens: int, copy: float, cpu: float
) -> None:  # fmt: skip
    """Time with a division by wrong rates, on a machine with the right ones. Ends are at most as far apart as the rates
    are wrong."""
    best = divide(128, 3 * MIB, tokens, 8, rates)
    wrong = PrefillRates(rates.copy_bytes_per_s * copy, rates.cpu.scaled(cpu))
    taken = divide(128, 3 * MIB, tokens, 8, wrong).streamed
    left = 128 - taken
    cpu_s = rates.cpu.seconds(left * (1 - (1 - 1 / 16) ** tokens), left * tokens / 16)
    took_s = max(taken * 3 * MIB / rates.copy_bytes_per_s, cpu_s)
    one_s = max(3 * MIB / rates.copy_bytes_per_s, rates.cpu.seconds(1, tokens / 16))  # experts are whole
    assert took_s <= max(best.copies_s, best.cpu_s) * ABOUT * 1.3 / 0.7 + one_s


def test_rates_move_towards_measurements() -> None:
    rates = PrefillRates(1e9, CpuExpertCost(1e-3, 1e-6))
    for _ in range(12):
        rates = rates.after_copies(4_000_000_000, 1.0).after_jobs(2.0 * rates.cpu.expert_s / 1e-3, 1.0)
    assert rates.copy_bytes_per_s == pytest.approx(4e9, rel=0.01)
    assert rates.cpu.expert_s == pytest.approx(0.5e-3, rel=0.01)
    assert rates.after_copies(0, 0.0) == rates
    assert rates.after_jobs(0.0, 1.0) == rates


def test_the_gpus_times_forget_what_disturbed_them() -> None:
    """Launches that a busy host was late with take longer; the next ones that were not count at once."""
    rates = PrefillRates(1e9, CpuExpertCost(1e-3, 1e-6)).after_launches(100, 10, 0.5, 0.1)
    assert rates.gpu(100) == GpuCost(0.05, 0.01)
    late = rates.after_launches(100, 10, 0.9, 0.3)
    assert late.gpu(100).own_s == pytest.approx(0.05 + LONGER * 0.04)
    assert late.gpu(100).experts_s == pytest.approx(0.01 + LONGER * 0.02)
    again = late.after_launches(100, 10, 0.02, 0.3)
    assert again.gpu(100).own_s == 0.002
    assert again.gpu(100).experts_s > late.gpu(100).experts_s
    for _ in range(30):
        again = again.after_launches(100, 10, 0.4, 0.2)
    assert again.gpu(100).own_s == pytest.approx(0.04, rel=0.01), "a time that stays longer is taken"


@pytest.mark.parametrize("cost", [CpuExpertCost(5e-5, 2e-6), CpuExpertCost(0.0, 1e-6), CpuExpertCost(1e-4, 0.0)])
def test_the_cost_is_found_from_two_jobs(cost: CpuExpertCost) -> None:
    jobs = [(experts, pairs, cost.seconds(experts, pairs)) for experts, pairs in ((16.0, 16.0), (16.0, 1024.0))]
    found = fitted_cost(*jobs)
    assert found.expert_s == pytest.approx(cost.expert_s, abs=1e-9)
    assert found.pair_s == pytest.approx(cost.pair_s, abs=1e-9)


def test_noise_makes_no_cost_negative() -> None:
    for few, many in (((16, 16, 1.0), (16, 1024, 0.5)), ((16, 16, 0.0), (16, 1024, 1.0))):
        found = fitted_cost(few, many)
        assert min(found.expert_s, found.pair_s) >= 0
        assert found.seconds(16, 16) > 0
    with pytest.raises(ValueError, match="not more per expert"):
        fitted_cost((16, 16, 1.0), (32, 32, 2.0))
