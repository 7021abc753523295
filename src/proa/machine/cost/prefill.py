"""Divides the experts of a layer that lie in RAM for a prompt: some are copied to the GPU over PCIe, the CPU computes
the others meanwhile. Belongs here: the division at which both end together, from measured rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HALF = 0.5  # weight of the latest measurement
ABOUT = 1.03  # divisions that take this much longer than the fastest count as equally fast
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
    """What a layer's experts cost on either side. Values, updated by `after_*`."""

    copy_bytes_per_s: float  # RAM to VRAM, while the CPU computes
    cpu: CpuExpertCost
    gpu_s: Mapping[int, GpuCost] = field(default_factory=dict)  # by the number of bits of the number of tokens

    def gpu(self, tokens: int) -> GpuCost:
        """The GPU's time for `tokens` tokens of a layer, as measured for about as many; 0 before that."""
        if not self.gpu_s:
            return GpuCost(0.0, 0.0)
        near = min(self.gpu_s, key=lambda bits: abs(bits - tokens.bit_length()))
        return self.gpu_s[near].scaled(max(1.0, tokens / (1 << near)))

    def after_copies(self, nbytes: int, took_s: float) -> PrefillRates:
        """The rates after copies of `nbytes` that took this long."""
        if nbytes <= 0 or took_s <= 0:
            return self
        factor = _bounded(nbytes / took_s / self.copy_bytes_per_s)
        return replace(self, copy_bytes_per_s=self.copy_bytes_per_s * (1 + HALF * (factor - 1)))

    def after_jobs(self, predicted_s: float, took_s: float) -> PrefillRates:
        """The rates after CPU jobs of a prompt that took this long, and were predicted to take predicted_s."""
        if predicted_s <= 0 or took_s <= 0:
            return self
        return replace(self, cpu=self.cpu.scaled(1 + HALF * (_bounded(took_s / predicted_s) - 1)))

    def after_launches(self, tokens: int, launches: int, own_s: float, experts_s: float) -> PrefillRates:
        """The rates after so many launches of layers with `tokens` tokens each, in which the GPU took own_s in all, and
        experts_s for its experts."""
        now, bits = GpuCost(own_s / launches, experts_s / launches), tokens.bit_length()
        before = self.gpu_s.get(bits, now)
        mean = GpuCost((before.own_s + now.own_s) / 2, (before.experts_s + now.experts_s) / 2)
        return replace(self, gpu_s={**self.gpu_s, bits: mean})


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
    """Return, of the divisions about as fast as the fastest, the one with the most copies: their rate varies less than
    the CPU's. For the arguments see `divisions`."""
    found = divisions(experts, expert_bytes, tokens, chosen_per_token, rates, jobs)
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
