"""Which plans a trial compares: those predicted within the error of the fastest, the rule first."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.hybrid.choices import Choices
from proa.machine.cost.co_fetch import InPlaceRates
from proa.plan.likely import ERROR, decode_seconds, likely
from proa.plan.plan import Plan
from unit.vram_cases import QWEN3_30B, gpu, machine, plan

BOTH, NO_FETCH, NO_READ, NEITHER = (
    Choices(a, b) for a, b in [(True, True), (False, True), (True, False), (False, False)]
)
NONE_FREE, HALF_FREE = InPlaceRates(50e9, 80e9), InPlaceRates(90e9, 190e9)  # of RAM's 100 GB/s the CPU reads 90


def made(experts: str = "8", **asked: object) -> Plan:
    return plan(QWEN3_30B, machine(124, gpu(140)), context=4096, gpu_experts=experts, **asked)


@pytest.mark.parametrize(
    ("experts", "able", "rates", "expected"),
    [
        ("0", BOTH, NONE_FREE, {BOTH, NO_FETCH, NO_READ, NEITHER}),  # RAM takes nearly all of a step's time
        ("0", BOTH, HALF_FREE, {BOTH, NO_READ}),  # twice the rate: a step without co-fetch takes nearly twice as long
        ("0", BOTH, None, {BOTH, NO_FETCH, NO_READ, NEITHER}),
        ("0", NO_FETCH, None, {NO_FETCH, NEITHER}),
        ("0", NO_READ, NONE_FREE, {NO_READ, NEITHER}),
        ("0", NEITHER, None, {NEITHER}),
    ],
)  # fmt: skip
def test_plans(experts: str, able: Choices, rates: InPlaceRates | None, expected: set[Choices]) -> None:
    found = likely(made(experts), able, rates)
    assert found[0] == able
    assert set(found) == expected
    assert len(found) == len(expected)


def test_read_ahead_is_not_tried_where_it_hides_much() -> None:
    """VRAM so slow that reading dense weights takes as long as the CPU's experts, which read ahead overlaps."""
    of = made("0", read_ahead="auto")
    (rank,), roof = of.roof.vram[0], of.roof
    ram_s = roof.bytes_per_token / roof.bandwidth_bytes_per_s
    slow = msgspec.structs.replace(rank, bandwidth_bytes_per_s=rank.dense_bytes_per_token / ram_s)
    of = msgspec.structs.replace(of, roof=msgspec.structs.replace(roof, vram=((slow,),)))
    assert likely(of, NO_FETCH, None) == (NO_FETCH,)


@given(
    st.sampled_from([BOTH, NO_FETCH, NO_READ, NEITHER]),
    st.none() | st.builds(InPlaceRates, st.floats(1e6, 1e12), st.floats(1e6, 1e12)),
)
def test_laws(able: Choices, rates: InPlaceRates | None) -> None:
    """The rule is first; others are possible and near the fastest; the fastest is among them."""
    of = PLAN
    found = likely(of, able, rates)
    every = {choices for choices in (BOTH, NO_FETCH, NO_READ, NEITHER) if choices.within(able) == choices}
    seconds = {choices: decode_seconds(of, choices, rates) for choices in every}
    assert found[0] == able
    assert set(found) <= every
    near = {choices for choices in every if seconds[choices] <= (1 + ERROR) * min(seconds.values())}
    assert set(found) == near | {able}


PLAN = made()
