"""The division of a layer's experts by the tokens of each, against brute force and wrong rates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from proa.hybrid.routed_layer import tokens_of_each
from proa.machine.cost.prefill import (
    ABOUT,
    LAYER,
    CpuExpertCost,
    GpuCost,
    PrefillRates,
    divide,
    divide_routed,
    head,
    routing_gain_s,
)
from proa.weights.frequencies import frequencies

MIB = 1 << 20
EXPERT_BYTES = 9_437_184  # Qwen3-30B-A3B in bfloat16
EXPERTS, TOP_K = 128, 8
LENGTHS = [64, 128, 512, 2048, 4096]
RATES = st.builds(
    PrefillRates,
    st.floats(1e9, 6e10),
    st.builds(CpuExpertCost, st.floats(1e-6, 1e-2), st.floats(1e-8, 1e-3)),
)
H200 = PrefillRates(55e9, CpuExpertCost(47e-6, 1.6e-6), {10: GpuCost(1e-3, 0.4e-3)})


def drawn(router: str, tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """Tokens of each expert, the hottest first on average."""
    return np.random.default_rng(seed).binomial(tokens, frequencies(router, EXPERTS, TOP_K)).astype(np.int64)


def ends_s(
    tokens_of: NDArray[np.int64], started: NDArray[np.bool_], more: NDArray[np.int64], rates: PrefillRates,
    queued_s: float, expert_bytes: int, gpu_s: float = 0.0,
) -> float:  # fmt: skip
    """When both sides have ended, if these experts are copied besides those that were started."""
    left = tokens_of[~started & ~np.isin(np.arange(len(started)), more)]
    cpu_s = rates.cpu.seconds(int((left > 0).sum()), int(left.sum()))
    return max(cpu_s, queued_s + len(more) * expert_bytes / rates.copy_bytes_per_s + gpu_s)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=9),
    RATES, st.floats(0, 1e-2), st.integers(1, 20),
)  # fmt: skip
def test_no_set_of_experts_ends_earlier(
    experts: list[tuple[int, bool]], rates: PrefillRates, queued_s: float, mib: int
) -> None:
    """Within 5 % of all sets of experts whose copies had not started."""
    tokens_of = np.array([tokens for tokens, _ in experts], np.int64)
    started = np.array([here for _, here in experts])
    got = divide_routed(tokens_of, started, mib * MIB, 100, rates, queued_s)
    rest = np.flatnonzero(~started)
    best_s = min(
        ends_s(tokens_of, started, rest[list(taken)], rates, queued_s, mib * MIB)
        for count in range(len(rest) + 1)
        for taken in itertools.combinations(range(len(rest)), count)
    )
    more = np.array(got.more, np.int64)
    assert ends_s(tokens_of, started, more, rates, queued_s, mib * MIB) <= 1.05 * best_s
    assert not started[more].any()
    assert (tokens_of[more] > 0).all(), "an expert that no token chose does not cross"
    assert got.of.streamed == started.sum() + len(more)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=200), RATES, st.floats(0, 1e-2), st.integers(1, 20)
)
def test_the_rule_one_expert_at_a_time(
    experts: list[tuple[int, bool]], rates: PrefillRates, queued_s: float, mib: int
) -> None:
    """The division to the expert, bit by bit, by a loop over the number of copies."""
    tokens_of = np.array([tokens for tokens, _ in experts], np.int64)
    started = np.array([here for _, here in experts], bool)
    rest = sorted(np.flatnonzero(~started & (tokens_of > 0)).tolist(), key=lambda expert: -tokens_of[expert])
    cpu_s, ends = list[float](), list[float]()
    for count in range(len(rest) + 1):
        left = [int(tokens_of[expert]) for expert in rest[count:]]
        cpu_s.append(rates.cpu.expert_s * len(left) + rates.cpu.pair_s * sum(left))
        ends.append(max(cpu_s[-1], queued_s + count * (mib * MIB / rates.copy_bytes_per_s)))
    taken = max(count for count, end_s in enumerate(ends) if end_s <= ABOUT * min(ends))
    found = divide_routed(tokens_of, started, mib * MIB, 100, rates, queued_s)
    assert found.more == tuple(rest[:taken])
    assert (found.of.streamed, found.of.cpu_s) == (sum(started) + taken, cpu_s[taken])


@pytest.mark.parametrize("chosen", [[], [-1], [3, 0, -1, 3, 5]])
def test_tokens_of_each_expert(chosen: list[int]) -> None:
    assert tokens_of_each(np.array(chosen, np.int32), 7).tolist() == [chosen.count(expert) for expert in range(7)]


@pytest.mark.parametrize("router", ["uniform", "zipf"])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("copy", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("cpu", [0.7, 1.0, 1.3])
def test_rates_that_are_30_percent_off(router: str, tokens: int, copy: float, cpu: float) -> None:
    """A pass of 48 layers, of which each is divided by what the layers before have shown: within 10 % of right rates.

    If both rates are wrong in opposite directions, the first layer's ends are 1.3 / 0.7 apart."""
    rates = PrefillRates(H200.copy_bytes_per_s * copy, H200.cpu.scaled(1 / cpu), H200.gpu_s)
    started, took_s, best_s = np.arange(EXPERTS) < EXPERTS // 16, 0.0, 0.0
    for layer in range(48):
        tokens_of = drawn(router, tokens, layer)
        ends = []
        for known in (rates, H200):
            found = divide_routed(tokens_of, started, EXPERT_BYTES, tokens, known, 0.0)
            more = np.array(found.more, np.int64)
            ends.append(ends_s(tokens_of, started, more, H200, 0.0, EXPERT_BYTES, H200.gpu(tokens).experts_s))
            if known is rates:
                left = tokens_of[~started & ~np.isin(np.arange(EXPERTS), more)]
                copied, job = len(more) * EXPERT_BYTES, (int((left > 0).sum()), int(left.sum()))
                rates = rates.after_copies(copied, copied / H200.copy_bytes_per_s, LAYER)
                rates = rates.after_counted_jobs(*job, H200.cpu.seconds(*job), LAYER)
        took_s, best_s = took_s + ends[0], best_s + ends[1]
    assert took_s <= 1.1 * best_s


@pytest.mark.parametrize("router", ["uniform", "zipf"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_hardly_an_expert_crosses_that_no_token_chose(router: str, tokens: int) -> None:
    """With heat from other prompts of the same router: at most 5 % of the bytes, and no more than before are copied."""
    expected = divide(EXPERTS, EXPERT_BYTES, tokens, TOP_K, H200).streamed
    first = head(expected, EXPERT_BYTES, tokens, H200)
    assert 0 < first < expected, "some are left to the routing"
    tokens_of = drawn(router, tokens)[np.argsort(-drawn(router, 500, seed=1), kind="stable")]
    found = divide_routed(tokens_of, np.arange(EXPERTS) < first, EXPERT_BYTES, tokens, H200, 0.0)
    copied = np.concatenate([np.arange(first), np.array(found.more, np.int64)])
    assert (tokens_of[copied] == 0).mean() <= 0.05
    assert len(copied) == found.of.streamed


def test_a_head_keeps_the_link_busy() -> None:
    """Its copies take 1.25 times as long as the GPU's work and the decision, and at least a quarter of the layer's."""
    gpu = GpuCost(2e-3, 1e-3)
    rates = PrefillRates(1e9, CpuExpertCost(1e-3, 1e-6), {10: gpu}, decide_s=1e-3)
    assert head(100, 1_000_000, 1000, rates) == 25
    assert head(100, 100_000, 1000, rates) == 50
    assert head(20, 100_000, 1000, rates) == 20, "more than expected are never queued"
    assert head(0, 100_000, 1000, rates) == 0


def test_the_gain_of_a_routing() -> None:
    """Four experts, each copied in 1 ms; the CPU needs 0.1 ms for an expert and 0.01 ms for a token. The tokens chose
    the last two. Copied in this order, three copies are best; by the routing, one is."""
    rates = PrefillRates(1e9, CpuExpertCost(1e-4, 1e-5), decide_s=1e-4)
    tokens_of = np.array([0, 0, 400, 10], np.int64)
    routed = divide_routed(tokens_of, np.zeros(4, bool), 1_000_000, 410, rates, 0.0)
    assert routed.more == (2,)
    gain_s = routing_gain_s(tokens_of, routed.of, 1_000_000, 410, rates)
    assert gain_s == pytest.approx(3e-3 - 1e-3), "three copies, not all four, or one"
    hottest_first = np.array([400, 10, 0, 0], np.int64)
    assert routing_gain_s(hottest_first, routed.of, 1_000_000, 410, rates) == pytest.approx(0.0), "copies hide the wait"


def test_heat_that_is_right_leaves_nothing_to_gain() -> None:
    """No division by the routing is faster than its wait allows, if experts were ordered by their tokens already."""
    for router in ("uniform", "zipf"):
        for tokens in LENGTHS:
            tokens_of = np.sort(drawn(router, tokens))[::-1].copy()
            found = divide_routed(tokens_of, np.zeros(EXPERTS, bool), EXPERT_BYTES, tokens, H200, 0.0)
            assert routing_gain_s(tokens_of, found.of, EXPERT_BYTES, tokens, H200) <= 0.01 * found.of.seconds


def test_jobs_of_known_tokens_have_their_own_rate() -> None:
    rates = PrefillRates(1e9, CpuExpertCost(1e-3, 1e-6))
    assert rates.counted_cpu == rates.cpu
    alike = rates.after_jobs(1.0, 0.5)
    assert alike.counted_cpu == alike.cpu == rates.cpu.scaled(0.75)
    for _ in range(40):
        rates = rates.after_counted_jobs(10, 1000, 10 * 2e-3 + 1000 * 2e-6, LAYER)
    assert rates.counted_cpu.expert_s == pytest.approx(2e-3, rel=0.01)
    assert rates.after_counted_jobs(0, 0, 1.0, LAYER) == rates
    assert rates.after_jobs(1.0, 0.5).counted_cpu == rates.counted_cpu
    assert rates.cpu == CpuExpertCost(1e-3, 1e-6)
