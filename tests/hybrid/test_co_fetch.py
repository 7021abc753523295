"""Co-fetch shares: goldens, the optimum by exhaustive search, and rates measured in service."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.hybrid.co_fetch import CoFetch
from proa.machine.cost.co_fetch import LEAST_BYTES, InPlaceRates, bound_by_ram, co_fetch_shares, update_is_due
from proa.native.doorbell import Counters

GB = 1e9
RATES = InPlaceRates(50 * GB, 1000 * GB)


@pytest.mark.parametrize(
    ("bus", "ram", "cpu", "shares"),
    [
        (50, 1000, 50, (0, 0, 1, 1, 2, 2, 3, 3, 4)),  # equal rates: half each, the odd one to the CPU
        (50, 1000, 150, (0, 0, 0, 0, 1, 1, 1, 1, 2)),  # a quarter, rounded down
        (50, 1000, 1000, (0,) * 9),  # RAM is used up
        (50, 200, 190, (0,) * 9),  # 10 GB/s are left of it
        (50, 200, 170, (0, 0, 0, 0, 0, 0, 1, 1, 1)),
        (100, 1000, 1, tuple(range(9))),
    ],
)
def test_shares(bus: float, ram: float, cpu: float, shares: tuple[int, ...]) -> None:
    assert co_fetch_shares(8, InPlaceRates(bus * GB, ram * GB), cpu * GB) == shares


@given(st.integers(1, 12), st.floats(1, 200), st.floats(1, 2000), st.floats(1, 1000))
def test_shares_are_optimal(top_k: int, bus: float, ram: float, cpu: float) -> None:
    shares, left = co_fetch_shares(top_k, InPlaceRates(bus, ram), cpu), min(bus, ram - cpu)
    assert len(shares) == top_k + 1
    if left <= 0:
        assert not any(shares)
        return
    for misses, fetched in enumerate(shares):
        assert 0 <= fetched <= misses
        took = max(fetched / left, (misses - fetched) / cpu)
        assert all(took <= max(n / left, (misses - n) / cpu) for n in range(misses + 1))


def test_shares_of_64_misses() -> None:
    """The GPU reads 60 % of any number of misses if PCIe is 1.5 times as fast as the CPU."""
    shares = co_fetch_shares(64, InPlaceRates(60 * GB, 1000 * GB), 40 * GB)
    assert len(shares) == 65
    assert all(abs(fetched - 0.6 * misses) < 1 for misses, fetched in enumerate(shares))
    assert shares[60] == 36


def test_half_of_the_misses_whatever_the_rates() -> None:
    fetch = CoFetch(None)
    assert fetch.shares[:6] == (0, 1, 1, 2, 2, 3)
    assert fetch.update(counters(20, 80, 2 * LEAST_BYTES, 1.0)) is None


def counters(jobs: int, pairs: int, nbytes: float, moe_s: float) -> Counters:
    return Counters(jobs, pairs, int(nbytes), moe_s, 0.0)


def test_no_co_fetch_before_the_cpu_is_measured() -> None:
    fetch = CoFetch(RATES)
    assert not any(fetch.shares)
    assert fetch.update(counters(10, 40, LEAST_BYTES - 1, 0.001)) is None
    shares = fetch.update(counters(20, 80, LEAST_BYTES + 50 * GB, 1.001))
    assert shares is not None
    assert shares[:9] == (0, 0, 1, 1, 2, 2, 3, 3, 4)
    assert fetch.update(counters(30, 120, LEAST_BYTES + 100 * GB, 2.001)) is None, "the same rate"
    assert fetch.update(counters(30, 120, LEAST_BYTES + 100 * GB, 2.001)) is None, "no job since"
    assert fetch.shares[:9] == (0, 0, 1, 1, 2, 2, 3, 3, 4)


def test_jobs_of_prompts_do_not_count() -> None:
    """Jobs of prompts, here 100 pairs each, are bound by arithmetic and do not update the CPU's rate."""
    fetch = CoFetch(RATES)
    assert fetch.update(counters(10, 1000, 5 * GB, 10)) is None
    shares = fetch.update(counters(20, 1080, 30 * GB, 10.5))
    assert shares is not None
    assert shares[:9] == (0, 0, 1, 1, 2, 2, 3, 3, 4)


@pytest.mark.parametrize(
    ("jobs", "pairs", "took_s", "expected"),
    [(10, 80, 1.0, True), (10, 81, 1.0, False), (10, 0, 1.0, False), (0, 0, 0.0, False), (10, 80, 0.0, False)],
)
def test_jobs_of_few_pairs_tell_the_read_rate(jobs: int, pairs: int, took_s: float, expected: bool) -> None:
    assert bound_by_ram(jobs, pairs, took_s, 8) is expected


@pytest.mark.parametrize(
    ("launched", "ended", "expected"),
    [(1, 0, True), (7, 6, True), (7, 5, False), (32, 30, True), (33, 31, False), (64, 0, True)],
)
def test_when_shares_are_updated(launched: int, ended: int, expected: bool) -> None:
    assert update_is_due(launched, ended) is expected
