"""The time of a pass, of which copies, GPU and CPU each take a part."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.ops.sizes import RING_BANKS
from proa.plan.pass_time import PassLayer, pass_seconds

SECONDS = st.floats(0, 10)
LAYERS = st.lists(st.builds(PassLayer, SECONDS, SECONDS, st.integers(1, 6), SECONDS, SECONDS), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("layers", "seconds"),
    [
        ([PassLayer(1.0)] * 3, 3),
        ([PassLayer(1.0, experts_s=2, cpu_s=3)] * 2, 8),
        ([PassLayer(1.0, 10, experts_s=2)], 12),  # the copies' end, and the experts behind them
        ([PassLayer(1.0, 10, 5, experts_s=5)], 11),  # only the last group's
        ([PassLayer(1.0, 10, experts_s=2)] * 4, 42),  # copies never wait
        ([PassLayer(12.0, 10, experts_s=2)] * 4, 56),  # nor does the GPU, but for the first one
        # Without experts in the first layer, copies can only fill the ring meanwhile: two of five groups.
        ([PassLayer(20.0), PassLayer(1.0, 10, 5)], 21 + 3 * 2),
        ([PassLayer(1.0, 1, cpu_s=7)] * 2, 16),
    ],
)
def test_what_waits_for_what(layers: list[PassLayer], seconds: float) -> None:
    assert pass_seconds(layers) == pytest.approx(seconds)


@given(LAYERS)
def test_a_pass_takes_at_least_what_each_part_takes(layers: list[PassLayer]) -> None:
    took_s = pass_seconds(layers) * (1 + 1e-9) + 1e-9
    assert took_s >= sum(of.copies_s for of in layers)
    assert took_s >= sum(of.own_s + max(of.experts_s, of.cpu_s) for of in layers)
    assert took_s <= 1e-6 + sum(of.own_s + of.copies_s + max(of.experts_s, of.cpu_s) for of in layers) * (1 + 1e-6)


@given(LAYERS)
def test_more_groups_with_room_for_all_are_not_slower(layers: list[PassLayer]) -> None:
    """In RING_BANKS groups a layer's experts are in the ring at once, as those of one group would be."""
    one = [replace(of, groups=1) for of in layers[:1]]
    several = [replace(of, groups=RING_BANKS) for of in layers[:1]]
    assert pass_seconds(several) <= pass_seconds(one) * (1 + 1e-9)
