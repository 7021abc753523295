"""The bound of `proa bench prefill`."""

from __future__ import annotations

import pytest

from proa.bench.prefill_bound import Shape, bound_s, prediction_error
from proa.engine.stats import PrefillStats

# Two layers of 8 experts of 1 MB, top 2; 4 of them in VRAM in the second layer.
SHAPE = Shape(((8, 8, 1_000_000, 2), (8, 4, 1_000_000, 2)), 5_000_000, 1_000_000, ((1024, None), (1024, 16)))
RATES = PrefillStats(cpu_expert_seconds=1e-4, cpu_pair_seconds=1e-6)


def test_flops() -> None:
    """Attention of 10 new tokens behind 100: all 1055 pairs in one layer, a window of 16 in the other."""
    assert SHAPE.flops(10, 100) == 2 * (5e6 * 10 + 1e6 + 1024 * (1055 + 160))


def test_each_layer_takes_the_longest_of_its_parts() -> None:
    assert SHAPE.in_ram_bytes == 12_000_000
    few = bound_s(SHAPE, 10_000, 1e9, RATES, None, 0)
    assert few is not None
    assert few <= 12e-3 * 1.03, "all experts copied"
    slow_gpu = bound_s(SHAPE, 10_000, 1e9, RATES, 1e9, 0)
    assert slow_gpu == pytest.approx(SHAPE.flops(10_000, 0) / 1e9)
    no_pcie = bound_s(SHAPE, 100, 1.0, RATES, None, 0)
    assert no_pcie == pytest.approx((8 * 1e-4 + 200e-6) + (4 * 1e-4 + 100e-6), rel=1e-3)


def test_unknown_rates_give_no_bound() -> None:
    assert bound_s(SHAPE, 100, 1e9, PrefillStats(), None, 0) is None
    assert bound_s(SHAPE, 100, 0.0, RATES, None, 0) is None


def test_prediction_error() -> None:
    before = PrefillStats(predicted_seconds=1.0, took_seconds=1.0)
    after = PrefillStats(predicted_seconds=1.4, took_seconds=1.5)
    assert prediction_error(before, after) == pytest.approx(0.25)
    assert prediction_error(before, before) is None
