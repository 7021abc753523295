"""The bound of `proa bench prefill`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.bench.prefill_bound import Limits, Shape, bound_s, least_division_s, prediction_error, read_shares
from proa.engine.stats import PrefillStats
from proa.machine.cost.prefill import CpuExpertCost
from proa.weights.frequencies import frequencies

# Two layers of 8 experts of 1 MB, top 2; 4 of them in VRAM in the second layer.
SHAPE = Shape(((8, 8, 1_000_000, 2), (8, 4, 1_000_000, 2)), 5_000_000, 1_000_000, ((1024, None), (1024, 16)), 500)
LIMITS = Limits(1e9, CpuExpertCost(1e-4, 1e-6))
UNIFORM = "uniform"


def test_flops() -> None:
    """Attention of 10 new tokens behind 100: all 1055 pairs in one layer, a window of 16 in the other."""
    assert SHAPE.flops(10, 100) == 2 * (5e6 * 10 + 1e6 + 1024 * (1055 + 160))


def test_each_layer_takes_the_longest_of_its_parts() -> None:
    assert SHAPE.in_ram_bytes == 12_000_000
    few = bound_s(SHAPE, 10_000, 0, UNIFORM, LIMITS)
    assert few is not None
    assert few <= 12e-3 * 1.03, "all experts copied"
    slow_gpu = bound_s(SHAPE, 10_000, 0, UNIFORM, replace(LIMITS, flops=1e9))
    assert slow_gpu == pytest.approx(SHAPE.flops(10_000, 0) / 1e9)
    slow_ram = bound_s(SHAPE, 10_000, 0, UNIFORM, replace(LIMITS, ram=1e8))
    assert slow_ram == pytest.approx(12_000_000 / 1e8), "each expert is read once, by either side"
    no_pcie = bound_s(SHAPE, 100, 0, UNIFORM, replace(LIMITS, upload=1.0), in_turn=False)
    assert no_pcie == pytest.approx((8 * 1e-4 + 200e-6) + (4 * 1e-4 + 100e-6), rel=1e-3)


def test_the_cpu_waits_for_the_gpu_and_its_sums_come_back() -> None:
    """Copies too slow to be used: own work, the CPU's experts and the way back follow one another in both layers."""
    limits = replace(LIMITS, upload=1e6, own_s=0.01)
    cpu_s = (8 * 1e-4 + 200e-6) + (4 * 1e-4 + 100e-6)
    back_s = 100 * 500 * 4 / 1e6
    assert bound_s(SHAPE, 100, 0, UNIFORM, limits) == pytest.approx(cpu_s + 2 * (0.01 + back_s), rel=1e-3)
    chunks = bound_s(SHAPE, 100, 0, UNIFORM, replace(limits, chunks=4))
    assert chunks == pytest.approx(cpu_s + 2 * (0.01 + back_s / 4), rel=1e-3), "the other chunks' ways overlap"
    streamed = replace(LIMITS, cpu=CpuExpertCost(1.0, 1.0), own_s=0.01)
    assert bound_s(SHAPE, 1000, 0, UNIFORM, streamed) == pytest.approx(12e-3), "copies wait for nothing"


@given(
    st.integers(1, 9), st.integers(1, 3), st.integers(1, 3000), st.sampled_from(["uniform", "zipf"]),
    st.floats(1e8, 6e10), st.floats(0, 1e-2), st.floats(1e-6, 1e-2), st.floats(1e-8, 1e-4),
)  # fmt: skip
def test_no_set_of_copied_experts_is_faster(
    experts: int, top_k: int, tokens: int, router: str, upload: float, own_s: float, expert_s: float, pair_s: float
) -> None:
    """All subsets of a layer's experts are tried."""
    often, nbytes = frequencies(router, experts, min(top_k, experts)), 3_000_000
    limits, shares = Limits(upload, CpuExpertCost(expert_s, pair_s)), read_shares(often, tokens)
    best_s = float("inf")
    for copied in itertools.product((False, True), repeat=experts):
        copies_s = sum(share * nbytes / upload for share, here in zip(shares, copied, strict=True) if here)
        left = [i for i, here in enumerate(copied) if not here]
        cpu_s = sum(expert_s * shares[i] + pair_s * tokens * often[i] for i in left)
        best_s = min(best_s, max(copies_s, own_s + cpu_s) if left else copies_s)
    one_s = min(nbytes / upload, expert_s + pair_s * tokens)  # the bound divides one expert
    got_s = least_division_s(often, nbytes, tokens, limits, own_s)
    assert got_s <= best_s * (1 + 1e-9) <= (got_s + one_s) * (1 + 2e-9)


def test_unknown_rates_give_no_bound() -> None:
    assert bound_s(SHAPE, 100, 0, UNIFORM, replace(LIMITS, cpu=CpuExpertCost(0.0, 0.0))) is None
    assert bound_s(SHAPE, 100, 0, UNIFORM, replace(LIMITS, upload=0.0)) is None


def test_prediction_error() -> None:
    before = PrefillStats(predicted_seconds=1.0, took_seconds=1.0)
    after = PrefillStats(predicted_seconds=1.4, took_seconds=1.5)
    assert prediction_error(before, after) == pytest.approx(0.25)
    assert prediction_error(before, before) is None
