"""Computes the figures of `proa bench hybrid`: bytes that a decode step reads, the roof that follows, and where the
step's time went. Pure functions of the engine's counters (Stats).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from operator import attrgetter
from statistics import median_low

import msgspec

from proa.bench.hybrid_hits import Hits, Trace, best_fixed_set
from proa.engine.stats import Stats
from proa.models.spec import Model
from proa.native.doorbell import FORESEEN_ROWS
from proa.plan.placement import BF16_BYTES
from proa.plan.plan import GpuPlan, step_seconds
from proa.plan.roof import past_bytes
from proa.weights.frequencies import frequencies


@dataclass(frozen=True)
class Moment:
    """The time at which a token was generated, by the engine's clock, and the engine's counters at that time."""

    time_s: float
    stats: Stats


@dataclass(frozen=True)
class DecodeInterval:
    """An interval of decode in which all requests of a run take part."""

    begin: Moment
    end: Moment

    @property
    def steps(self) -> int:
        return self.end.stats.scheduler.steps - self.begin.stats.scheduler.steps

    @property
    def step_s(self) -> float:
        return (self.end.time_s - self.begin.time_s) / self.steps

    @property
    def tokens_per_s(self) -> float:
        made = self.end.stats.scheduler.generated_tokens - self.begin.stats.scheduler.generated_tokens
        return made / (self.end.time_s - self.begin.time_s)

    def counted(self, counter: str) -> float:
        """Return the increase of a counter of Stats over the interval, named by its path ("cpu_experts.jobs")."""
        value = attrgetter(counter)
        return float(value(self.end.stats) - value(self.begin.stats))

    def per_step(self, counter: str) -> float:
        return self.counted(counter) / self.steps


def common_interval(arrivals: Iterable[Sequence[Moment]]) -> DecodeInterval | None:
    """Return the interval in which all requests decode: from the latest first token to the earliest last token. None if
    it has no step."""
    each = list(arrivals)
    begin = max((moments[0] for moments in each), key=lambda moment: moment.time_s)
    end = min((moments[-1] for moments in each), key=lambda moment: moment.time_s)
    return (
        DecodeInterval(begin, end)
        if end.stats.scheduler.steps > begin.stats.scheduler.steps and end.time_s > begin.time_s
        else None
    )


def median_interval(intervals: Iterable[DecodeInterval]) -> DecodeInterval:
    """Return the interval of median tokens/s. All figures are computed from this one, so that their parts add up."""
    each = list(intervals)
    rate = median_low(one.tokens_per_s for one in each)
    return next(one for one in each if one.tokens_per_s == rate)


class StepBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a decode step reads; weights count once per step, regardless of the number of requests."""

    dense: float  # from VRAM: dense weights, KV cache and states; states count twice, as they are also written
    resident: float  # from VRAM: experts
    cpu: float  # from RAM: experts computed by the CPU, and those that the GPU reads from RAM


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, measured in the same run."""

    hbm: float
    ram: float
    pcie: float | None = None  # from pinned RAM to VRAM; None without PCIe (simulated GPU)


def expected_distinct(chosen: Iterable[float], requests: int) -> float:
    """Return the expected number of distinct experts that `requests` tokens select; chosen: the probability of each
    expert to be selected by a token."""
    return sum(1 - (1 - frequency) ** requests for frequency in chosen)


def dense_bytes(
    spec: Model, gpu: GpuPlan, requests: int, context_tokens: float, kv_elem_bytes: int = BF16_BYTES
) -> float:
    """Return the bytes of dense weights, KV cache and states that a step reads."""
    return gpu.vram.dense_read_bytes + requests * past_bytes(spec, context_tokens, BF16_BYTES, kv_elem_bytes)


def expected_bytes(spec: Model, gpu: GpuPlan, router: str, requests: int, dense: float, cpu_bytes: float) -> StepBytes:
    """Return the bytes per step, for cases in which it does not matter which experts are resident: uniform routing, or
    all experts resident, or none.

    dense, cpu_bytes: bytes per step as known and as counted. Resident experts' bytes are the expectation. With co-fetch
    the CPU's counter lacks the experts that the GPU reads from RAM; these are added by expectation.
    """
    resident_bytes = all_bytes = 0.0
    layers = list(spec.routed.values())
    for layer, expert_bytes, resident in zip(layers, gpu.expert_bytes, gpu.resident, strict=True):
        distinct = expected_distinct(frequencies(router, layer.experts, layer.top_k), requests)
        all_bytes += distinct * expert_bytes
        resident_bytes += distinct * expert_bytes * len(resident) / layer.experts
    if gpu.co_fetch:
        cpu_bytes = max(cpu_bytes, all_bytes - resident_bytes)
    return StepBytes(dense=dense, resident=resident_bytes, cpu=cpu_bytes)


def choices_per_step(spec: Model, requests: int) -> int:
    """Return the (token, expert) pairs of one decode step. The engine's counters of pairs lag by a few steps, so an
    interval's counted pairs may belong to slightly more or fewer steps than it has."""
    return requests * sum(ffn.top_k for ffn in spec.routed.values())


def placed_bytes(interval: DecodeInterval, gpu: GpuPlan, requests: int, dense: float, choices: int) -> StepBytes:
    """Return the bytes per step of the experts that were selected, by where they were. choices: pairs per step."""
    return _bytes_of(hits_of(interval), gpu, requests, dense, choices)


def best_bytes(trace: Trace, gpu: GpuPlan, requests: int, dense: float, choices: int) -> StepBytes:
    """Return the bytes per step if the interval's most selected experts had been in VRAM all the time. trace: of the
    interval; choices: pairs per step."""
    best = best_fixed_set(trace, [len(ids) for ids in gpu.resident], gpu.expert_bytes)
    return _bytes_of(best, gpu, requests, dense, choices)


def _bytes_of(found: Hits, gpu: GpuPlan, requests: int, dense: float, choices: int) -> StepBytes:
    """Return the bytes per step of the selected experts. choices: pairs per step.

    One request selects distinct experts, so pairs are counted. Several requests share experts; then bytes are used, in
    which an expert counts once per look (one count of selections), normally once per step.
    """
    steps = found.choices / choices
    if not steps:
        return StepBytes(dense=dense, resident=0.0, cpu=0.0)
    if requests > 1:
        return StepBytes(dense=dense, resident=found.hit_bytes / steps, cpu=found.missed_bytes / steps)
    each, hits = sum(gpu.expert_bytes) / len(gpu.expert_bytes), found.hits / steps
    return StepBytes(dense=dense, resident=each * hits, cpu=each * (choices - hits))


def hits_of(interval: DecodeInterval) -> Hits:
    names = ("choices", "hits", "hit_bytes", "missed_bytes")
    return Hits(*(interval.counted(f"residency.{name}") for name in names))


def foreseen_share(interval: DecodeInterval) -> float | None:
    """Return the fraction of the CPU's experts that were predicted before their job; None if there were no jobs."""
    needed = interval.per_step("cpu_experts.needed")
    return interval.per_step("cpu_experts.foreseen") / needed if needed else None


def fixed_us_per_layer(interval: DecodeInterval) -> float | None:
    """Return the mean time in us from a layer's CPU job to the next layer's: GPU work and transport; None without such
    pairs."""
    gaps = interval.per_step("cpu_experts.gaps")
    return 1e6 * interval.per_step("cpu_experts.gap_seconds") / gaps if gaps else None


def trace_of(interval: DecodeInterval, trace: Trace) -> Trace:
    """Return the interval's part of the whole trace."""
    return trace[interval.begin.stats.residency.looks : interval.end.stats.residency.looks]


def roof_tokens_per_s(
    read: StepBytes, rates: Rates, requests: int, *, read_ahead: bool = False, deferred: int = 0
) -> float:  # fmt: skip
    """Return the roof in tokens/s for all requests together (see step_seconds). read_ahead: ignored for more than
    FORESEEN_ROWS requests, for which no experts are predicted. deferred: of a token's experts; any number of them may
    be read while the GPU reads dense weights."""
    ahead = deferred > 0 or (read_ahead and requests <= FORESEEN_ROWS)
    dense_s, resident_s = read.dense / rates.hbm, read.resident / rates.hbm
    return requests / step_seconds(dense_s, resident_s, read.cpu / rates.ram, read_ahead=ahead)


def _answering_s(interval: DecodeInterval) -> float:
    """Return the seconds per step in which the GPU may wait for CPU jobs: without deferred experts."""
    return interval.per_step("cpu_experts.seconds") - interval.per_step("cpu_experts.deferred_seconds")


def split_ms(interval: DecodeInterval, round_trip_us: float | None) -> dict[str, float]:
    """Split the mean step time into four parts that add up: cpu_experts_ms and host_ms are measured, transport_ms is an
    empty round trip per CPU job, gpu_ms is the rest. cpu_waiting_ms is measured separately: the time in a step without
    a CPU job.
    """
    cpu = 1e3 * _answering_s(interval)
    host = 1e3 * interval.per_step("seconds.host")
    transport = 1e-3 * (round_trip_us or 0.0) * interval.per_step("cpu_experts.jobs")
    return {
        "cpu_experts_ms": cpu,
        "transport_ms": transport,
        "gpu_ms": 1e3 * interval.step_s - cpu - transport - host,
        "host_ms": host,
        "cpu_waiting_ms": 1e3 * interval.per_step("cpu_experts.waiting_seconds"),
    }


def placed_figures(
    interval: DecodeInterval, gpu: GpuPlan, requests: int, placed: StepBytes, rates: Rates
) -> dict[str, float | None]:
    """Compute the figures that depend on where the selected experts were."""
    roof = roof_tokens_per_s(placed, rates, requests, read_ahead=gpu.read_ahead, deferred=gpu.deferred)
    return {
        "roof_as_placed_tokens_per_s": roof,
        "roof_as_placed_share": interval.tokens_per_s / roof,
        "ram_bytes_per_step": placed.cpu,
        "moved_bytes_per_step": interval.per_step("residency.moved_bytes"),
    }


def hit_figures(interval: DecodeInterval, trace: Trace | None, gpu: GpuPlan) -> dict[str, float | None]:
    """Compute the hit rate, and that of the best fixed set of experts. trace: of the interval; None if all experts are
    resident, or none."""
    if trace is None:
        rate = float(gpu.gpu_only)
        return {"hit_rate": rate, "best_hit_rate": rate}
    best = best_fixed_set(trace, [len(ids) for ids in gpu.resident], gpu.expert_bytes)
    return {"hit_rate": hits_of(interval).rate, "best_hit_rate": best.rate}


def figures_of(
    interval: DecodeInterval, gpu: GpuPlan, requests: int, read: StepBytes, rates: Rates
) -> dict[str, float | None]:
    """Compute rates, the roof and bytes per step. Only if the CPU has all experts: fixed_us_per_layer, measured by the
    CPU from a layer's experts to the next layer's, unless it computes deferred ones meanwhile; beside_us_per_layer, the
    step time without experts, divided by layers (includes head and host)."""
    roof = roof_tokens_per_s(read, rates, requests, read_ahead=gpu.read_ahead, deferred=gpu.deferred)
    layers = len(gpu.resident)
    resident = sum(map(len, gpu.resident))
    beside_s = interval.step_s - _answering_s(interval)
    return {
        "requests": requests,
        "tokens_per_s": interval.tokens_per_s,
        "tokens_per_s_per_request": interval.tokens_per_s / requests,
        "step_ms": 1e3 * interval.step_s,
        "roof_tokens_per_s": roof,
        "roof_share": interval.tokens_per_s / roof,
        "fixed_us_per_layer": None if resident or gpu.deferred else fixed_us_per_layer(interval),
        "beside_us_per_layer": None if resident else 1e6 * beside_s / layers,
        "layers": layers,
        "steps": interval.steps,
        "resident_share": resident / sum(gpu.experts),
        "dense_bytes_per_step": read.dense,
        "resident_bytes_per_step": read.resident,
        "cpu_bytes_per_step": interval.per_step("cpu_experts.weight_bytes"),
        "cpu_jobs_per_step": interval.per_step("cpu_experts.jobs"),
        "foreseen_share": foreseen_share(interval),
        "deferred_experts": gpu.deferred,
        "deferred_pairs_per_step": interval.per_step("cpu_experts.deferred"),
        "cpu_deferred_ms": 1e3 * interval.per_step("cpu_experts.deferred_seconds"),
        "hbm_bytes_per_s": rates.hbm,
        "ram_bytes_per_s": rates.ram,
        "pcie_bytes_per_s": rates.pcie,
    }


def uncached_steps(requests: int, uncached_tokens: int, batch_tokens: int) -> int:
    """Return an upper bound of the steps between the first and the last request's first token.

    uncached_tokens: tokens of each prompt to prefill. One step per request is added, as requests may arrive one by one.
    """
    return ceil(requests * uncached_tokens / max(1, batch_tokens - requests)) + requests
