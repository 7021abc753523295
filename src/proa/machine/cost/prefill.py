"""Divides the experts of a layer that lie in RAM for a prompt: some are copied to the GPU over PCIe, the CPU computes
the others meanwhile. Belongs here: the division at which both end together, from measured rates: before the layer's
routing is known, with all experts alike, or by the tokens of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

HALF = 0.5  # weight of the latest measurement, of a pass
LAYER = 0.25  # and of one layer
LONGER = 0.25  # and of a GPU time that is longer than before: the host may have been late with the launches
UNMEASURED = 0.25  # share of the way back to its trial that the CPU's cost goes after a pass that did not measure it
ABOUT = 1.03  # divisions that take this much longer than the fastest count as equally fast
DECIDE_S = 2e-4  # of reading a layer's routing and dividing its experts by it, until that is measured
LEAD = 1.25  # copies queued before the routing is known take so many times as long as the GPU is expected to need
LEAST_HEAD = 0.25  # of the experts that are expected to be copied, queued before the routing is known
PROBED_LAYERS = 2  # first layers of a pass, divided by their routing to find out if that gains time for this prompt
MOST_FACTOR = 8.0  # between a measurement and the estimate before it: beyond, something else disturbed the machine


@dataclass(frozen=True)
class CpuExpertCost:
    """The CPU's time for its experts of a layer: for each job `expert_s` per expert that it reads, and `pair_s` per
    (token, expert) pair that it computes."""

    expert_s: float
    pair_s: float

    def seconds(self, experts: float, pairs: float, jobs: int = 1) -> float:
        """jobs: the layer's tokens come in so many chunks, and each reads its experts anew."""
        return jobs * self.expert_s * experts + self.pair_s * pairs

    def scaled(self, factor: float) -> CpuExpertCost:
        return CpuExpertCost(self.expert_s * factor, self.pair_s * factor)


@dataclass(frozen=True)
class GpuCost:
    """The GPU's time for one launch of a layer. own_s: before its experts, while the CPU waits; experts_s: for them,
    while the CPU computes."""

    own_s: float
    experts_s: float

    def scaled(self, factor: float) -> GpuCost:
        return GpuCost(self.own_s * factor, self.experts_s * factor)


@dataclass(frozen=True)
class PrefillRates:
    """The cost of a layer's experts on GPU and CPU. Immutable: `after_*` return the updated rates."""

    copy_bytes_per_s: float  # RAM to VRAM, while the CPU computes
    cpu: CpuExpertCost
    gpu_s: Mapping[int, GpuCost] = field(default_factory=dict)  # by the number of bits of the number of tokens
    decide_s: float = DECIDE_S  # from a layer's routing until the GPU and the CPU go on by it
    by_tokens: CpuExpertCost | None = None  # the CPU's, by what its jobs had; None: not measured yet

    @property
    def counted_cpu(self) -> CpuExpertCost:
        """The CPU's cost for experts whose tokens are known. With `cpu` all count as alike, though those that are left
        to the CPU have fewer tokens than others: it is lower where a few are hot. Both are measured in each pass."""
        return self.by_tokens or self.cpu

    def gpu(self, tokens: int) -> GpuCost:
        """The GPU's time for `tokens` tokens of a layer, as measured for about as many; 0 before that."""
        if not self.gpu_s:
            return GpuCost(0.0, 0.0)
        near = min(self.gpu_s, key=lambda bits: abs(bits - tokens.bit_length()))
        return self.gpu_s[near].scaled(max(1.0, tokens / (1 << near)))

    def after_copies(self, nbytes: int, took_s: float, weight: float = HALF) -> PrefillRates:
        """The rates after copies of `nbytes` that took this long."""
        if nbytes <= 0 or took_s <= 0:
            return self
        factor = _bounded(nbytes / took_s / self.copy_bytes_per_s)
        return replace(self, copy_bytes_per_s=self.copy_bytes_per_s * (1 + weight * (factor - 1)))

    def after_counted_jobs(self, experts: int, pairs: int, took_s: float, weight: float) -> PrefillRates:
        """The rates after CPU jobs of so many experts and pairs took this long."""
        predicted_s = self.counted_cpu.seconds(experts, pairs)
        if predicted_s <= 0 or took_s <= 0:
            return self
        factor = 1 + weight * (_bounded(took_s / predicted_s) - 1)
        return replace(self, by_tokens=self.counted_cpu.scaled(factor))

    def after_jobs(self, predicted_s: float, took_s: float) -> PrefillRates:
        """The rates after CPU jobs of a prompt that took this long, and were predicted to take predicted_s."""
        if predicted_s <= 0 or took_s <= 0:
            return self
        return replace(self, cpu=self.cpu.scaled(1 + HALF * (_bounded(took_s / predicted_s) - 1)))

    def nearer_to(self, trial: CpuExpertCost) -> PrefillRates:
        """The rates after a pass that did not measure the CPU's cost: a step nearer to that of the trial."""
        cpu = self.cpu
        expert_s = cpu.expert_s + UNMEASURED * (trial.expert_s - cpu.expert_s)
        return replace(self, cpu=CpuExpertCost(expert_s, cpu.pair_s + UNMEASURED * (trial.pair_s - cpu.pair_s)))

    def after_launches(self, tokens: int, launches: int, own_s: float, experts_s: float) -> PrefillRates:
        """The rates after so many launches of layers with `tokens` tokens each, in which the GPU took own_s in all, and
        experts_s for its experts. A shorter time than before counts at once: disturbances only make it longer."""
        now, bits = GpuCost(own_s / launches, experts_s / launches), tokens.bit_length()
        before = self.gpu_s.get(bits, now)
        cost = GpuCost(_shorter(before.own_s, now.own_s), _shorter(before.experts_s, now.experts_s))
        return replace(self, gpu_s={**self.gpu_s, bits: cost})

    def after_decisions(self, count: int, took_s: float) -> PrefillRates:
        """The rates after `count` layers were divided by their routing, for which the device waited took_s in all."""
        return replace(self, decide_s=(self.decide_s + took_s / count) / 2) if count else self


def _shorter(before_s: float, now_s: float) -> float:
    return now_s if now_s < before_s else before_s + LONGER * (now_s - before_s)


def _bounded(factor: float) -> float:
    return min(MOST_FACTOR, max(1 / MOST_FACTOR, factor))


def fitted_cost(few: tuple[float, float, float], many: tuple[float, float, float]) -> CpuExpertCost:
    """The cost from two measured jobs, each (experts, pairs, seconds); `many` has more pairs per expert."""
    (experts, pairs, took_s), (experts_2, pairs_2, took_2_s) = few, many
    determinant = experts * pairs_2 - experts_2 * pairs
    if determinant <= 0:
        raise ValueError(f"{pairs_2} pairs of {experts_2} experts are not more per expert than {pairs} of {experts}")
    expert_s = (took_s * pairs_2 - took_2_s * pairs) / determinant
    pair_s = (experts * took_2_s - experts_2 * took_s) / determinant
    # noise may make one of them negative: then all time counts as the other's
    if pair_s <= 0:
        return CpuExpertCost(took_s / experts, 0.0)
    return CpuExpertCost(expert_s, pair_s) if expert_s > 0 else CpuExpertCost(0.0, took_2_s / pairs_2)


@dataclass(frozen=True)
class Division:
    """streamed: experts that are copied; predicted durations of the copies, of the CPU's jobs, and of all that GPU and
    CPU compute in turn."""

    streamed: int
    copies_s: float
    cpu_s: float
    computed_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.copies_s, self.computed_s)


def divide(
    experts: int, expert_bytes: int, tokens: int, chosen_per_token: float, rates: PrefillRates, *,
    jobs: int = 1,
) -> Division:  # fmt: skip
    """The division to take. For the arguments see `divisions`."""
    return taken_of(divisions(experts, expert_bytes, tokens, chosen_per_token, rates, jobs))


def taken_of(found: Sequence[Division]) -> Division:
    """Return, of the divisions about as fast as the fastest, the one with the most copies: their rate varies less than
    the CPU's."""
    fast_s = ABOUT * min(division.seconds for division in found)
    return max((division for division in found if division.seconds <= fast_s), key=lambda division: division.streamed)


def divisions(
    experts: int, expert_bytes: int, tokens: int, chosen_per_token: float, rates: PrefillRates, jobs: int = 1
) -> list[Division]:
    """All divisions of `experts` in RAM, the one without copies first. Each token chooses `chosen_per_token` of these
    experts on average, all alike. jobs: see CpuExpertCost.seconds."""
    share = min(1.0, chosen_per_token / experts) if experts else 0.0
    read = 1 - (1 - share) ** (tokens / jobs)  # the share of experts that a job's tokens choose at all
    gpu = rates.gpu(-(-tokens // jobs))

    def at(streamed: int) -> Division:
        left = experts - streamed
        copies_s = streamed * expert_bytes / rates.copy_bytes_per_s
        cpu_s = rates.cpu.seconds(left * read, left * share * tokens, jobs)
        return Division(streamed, copies_s, cpu_s, jobs * gpu.own_s + max(cpu_s, jobs * gpu.experts_s))

    return [at(streamed) for streamed in range(experts + 1)]


Tokens = NDArray[np.int64]  # of each expert of a layer in RAM


@dataclass(frozen=True)
class RoutedDivision:
    """A layer's experts divided by their tokens. more: indices of those that are copied besides those whose copies had
    been started; of: the layer's experts and times."""

    more: tuple[int, ...]
    of: Division


def divide_routed(
    tokens_of: Tokens, started: NDArray[np.bool_], expert_bytes: int, tokens: int, rates: PrefillRates,
    queued_s: float,
) -> RoutedDivision:  # fmt: skip
    """Divide the experts whose copies have not started: of those that a token chose, the ones with most tokens are
    copied, so that copies and the CPU end together. Each crosses PCIe in the same time, so no other set is better.

    tokens_of: tokens of each expert; started: whether its copy has; tokens: of the layer; queued_s: until the copies
    that were started have arrived. Of divisions about as fast as the fastest, the one with the most copies is taken.
    """
    gpu, copy_s = rates.gpu(tokens), expert_bytes / rates.copy_bytes_per_s
    left = np.where(started, 0, tokens_of)
    order = (-left).argsort(kind="stable")
    rest = order[: np.count_nonzero(left)]
    cpu_s = _cpu_s(left[rest], rates)
    ends_s = np.maximum(cpu_s, queued_s + np.arange(len(cpu_s)) * copy_s + gpu.experts_s)
    taken = int((ends_s <= ABOUT * ends_s.min()).nonzero()[0][-1])
    streamed = int(np.count_nonzero(started)) + taken
    computed_s = gpu.own_s + rates.decide_s + float(ends_s[taken])
    return RoutedDivision(
        tuple(rest[:taken].tolist()), Division(streamed, streamed * copy_s, float(cpu_s[taken]), computed_s)
    )


def _cpu_s(tokens_of: Tokens, rates: PrefillRates) -> NDArray[np.float64]:
    """The CPU's time for these experts if the first 0, 1, ... of them are copied: one more element than experts.
    tokens_of: of each expert."""
    read, pairs = np.zeros(len(tokens_of) + 1, np.int64), np.zeros(len(tokens_of) + 1, np.int64)
    (tokens_of > 0).cumsum(out=read[1:])
    tokens_of.cumsum(out=pairs[1:])
    cost = rates.counted_cpu
    seconds: NDArray[np.float64] = cost.expert_s * (read[-1] - read) + cost.pair_s * (pairs[-1] - pairs)
    return seconds


def head(experts: int, expert_bytes: int, tokens: int, rates: PrefillRates) -> int:
    """How many copies are queued before a layer's routing is known, if `experts` are expected to be copied: as many as
    keep PCIe busy until the host has divided the others."""
    gpu = rates.gpu(tokens)
    wait_s = LEAD * (gpu.own_s + gpu.experts_s + rates.decide_s)
    lead = max(LEAST_HEAD * experts, wait_s * rates.copy_bytes_per_s / expert_bytes)
    return min(experts, ceil(lead))


def routing_gain_s(
    tokens_of: Tokens, routed: Division, expert_bytes: int, tokens: int, rates: PrefillRates
) -> float:  # fmt: skip
    """Seconds by which a layer ends earlier if it is divided by its routing, compared with copying the first n experts
    for the best n, which divisions made beforehand approach as rates adapt. tokens_of: of each expert, in the order in
    which they would be copied."""
    gpu, cpu_s = rates.gpu(tokens), _cpu_s(tokens_of, rates)
    copies_s = np.arange(len(cpu_s)) * expert_bytes / rates.copy_bytes_per_s
    before_s = float(np.maximum(copies_s, gpu.own_s + np.maximum(cpu_s, gpu.experts_s)).min())
    return before_s - max(routed.copies_s, gpu.own_s + rates.decide_s + max(routed.cpu_s, gpu.experts_s))
