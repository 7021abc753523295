"""The arithmetic of `proa bench hybrid`: what a step had to read, how fast that can be, where its time went. Never:
clocks, engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median_low

import msgspec

from proa.bench.hybrid_hits import Trace, best_kept
from proa.engine.ipc import Stats
from proa.models.spec import Model, Moe
from proa.native.doorbell import FORESEEN_ROWS
from proa.plan.placement import BF16_BYTES
from proa.plan.plan import GpuPlan, step_seconds
from proa.plan.roof import past_bytes
from proa.weights.frequencies import frequencies


@dataclass(frozen=True)
class Moment:
    """When a token was made, by the engine's clock, and its counters then."""

    time_s: float
    stats: Stats


@dataclass(frozen=True)
class Span:
    """Decoding from one moment to another, with every request of a run taking part."""

    begin: Moment
    end: Moment

    @property
    def steps(self) -> int:
        return self.end.stats.steps - self.begin.stats.steps

    @property
    def step_s(self) -> float:
        return (self.end.time_s - self.begin.time_s) / self.steps

    @property
    def tokens_per_s(self) -> float:
        made = self.end.stats.generated_tokens - self.begin.stats.generated_tokens
        return made / (self.end.time_s - self.begin.time_s)

    def counted(self, counter: str) -> float:
        """By a counter of Stats."""
        return float(getattr(self.end.stats, counter) - getattr(self.begin.stats, counter))

    def per_step(self, counter: str) -> float:
        return self.counted(counter) / self.steps


def common_span(arrivals: Iterable[Sequence[Moment]]) -> Span | None:
    """From the last one's first token to the first one's last; None where they have no step in common."""
    each = list(arrivals)
    begin = max((moments[0] for moments in each), key=lambda moment: moment.time_s)
    end = min((moments[-1] for moments in each), key=lambda moment: moment.time_s)
    return Span(begin, end) if end.stats.steps > begin.stats.steps and end.time_s > begin.time_s else None


def middle(spans: Iterable[Span]) -> Span:
    """The span of median rate: all figures are of one span, so that parts add up."""
    each = list(spans)
    rate = median_low(span.tokens_per_s for span in each)
    return next(span for span in each if span.tokens_per_s == rate)


class StepBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode step must read, each byte once however many requests need it."""

    dense: float  # from VRAM: dense weights, KV and states of all requests; states twice, as they are written too
    resident: float  # from VRAM: experts
    cpu: float  # from RAM: experts, of the CPU and those that the GPU reads there


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, measured in the same run."""

    hbm: float
    ram: float
    pcie: float | None = None  # from pinned RAM to VRAM; None: there is no link


def expected_distinct(chosen: Iterable[float], requests: int) -> float:
    """Of experts that a token chooses with these frequencies, how many `requests` tokens choose, on average."""
    return sum(1 - (1 - frequency) ** requests for frequency in chosen)


def dense_bytes(
    spec: Model, gpu: GpuPlan, requests: int, context_tokens: float, kv_elem_bytes: int = BF16_BYTES
) -> float:
    """What a step reads of dense weights, KV and states."""
    return gpu.vram.dense_read_bytes + requests * past_bytes(spec, context_tokens, BF16_BYTES, kv_elem_bytes)


def expected_bytes(spec: Model, gpu: GpuPlan, router: str, requests: int, dense: float, cpu_bytes: float) -> StepBytes:
    """Where it does not matter which experts are resident: routing is even, or all are, or none. `cpu_bytes` are
    counted; resident experts are expected by their number. What the GPU reads in RAM is the rest of the others.
    """
    resident_bytes = all_bytes = 0.0
    layers = [block.ffn for block in spec.blocks if isinstance(block.ffn, Moe)]
    for layer, expert_bytes, resident in zip(layers, gpu.expert_bytes, gpu.resident, strict=True):
        distinct = expected_distinct(frequencies(router, layer.experts, layer.top_k), requests)
        all_bytes += distinct * expert_bytes
        resident_bytes += distinct * expert_bytes * len(resident) / layer.experts
    if gpu.co_fetch:
        cpu_bytes = max(cpu_bytes, all_bytes - resident_bytes)
    return StepBytes(dense=dense, resident=resident_bytes, cpu=cpu_bytes)


def choices_per_step(spec: Model, requests: int) -> int:
    """Of experts. Counts of them come some steps late, so a span has those of a few more or fewer than its own."""
    return requests * sum(block.ffn.top_k for block in spec.blocks if isinstance(block.ffn, Moe))


def placed_bytes(span: Span, gpu: GpuPlan, requests: int, dense: float, choices: int) -> StepBytes:
    """What was really read, whoever read it. Of one request each choice is an expert of its own; of more, an expert
    counts once a step, as far as looks are whole steps. choices: of a step."""
    steps = span.counted("expert_choices") / choices
    if not steps:
        return StepBytes(dense=dense, resident=0.0, cpu=0.0)
    if requests == 1:
        each = sum(gpu.expert_bytes) / len(gpu.expert_bytes)
        hits = span.counted("expert_hits") / steps
        return StepBytes(dense=dense, resident=each * hits, cpu=each * (choices - hits))
    hit_bytes, missed_bytes = (span.counted(f"expert_{which}_bytes") / steps for which in ("hit", "missed"))
    return StepBytes(dense=dense, resident=hit_bytes, cpu=missed_bytes)


def best_bytes(trace: Trace, gpu: GpuPlan, requests: int, dense: float, choices: int) -> StepBytes:
    """Where the experts that a span chose most were in VRAM all the time. trace: of the span; choices: of a step."""
    best, steps = best_kept(trace, [len(ids) for ids in gpu.resident], gpu.expert_bytes), int(trace.sum()) / choices
    if not steps:
        return StepBytes(dense=dense, resident=0.0, cpu=0.0)
    if requests > 1:
        return StepBytes(dense=dense, resident=best.hit_bytes / steps, cpu=best.missed_bytes / steps)
    each, hits = sum(gpu.expert_bytes) / len(gpu.expert_bytes), best.hits / steps
    return StepBytes(dense=dense, resident=each * hits, cpu=each * (choices - hits))


def hit_rate(span: Span) -> float | None:
    """Share of the choices that found their expert in VRAM."""
    choices = span.per_step("expert_choices")
    return span.per_step("expert_hits") / choices if choices else None


def foreseen_share(span: Span) -> float | None:
    """Of the experts that the CPU computed, what it was told of before its turn."""
    needed = span.per_step("cpu_experts_needed")
    return span.per_step("cpu_experts_foreseen") / needed if needed else None


def fixed_us_per_layer(span: Span) -> float | None:
    """What the GPU does between two layers' experts, and the way there and back; None: no layer followed another."""
    gaps = span.per_step("cpu_gaps")
    return 1e6 * span.per_step("cpu_gap_seconds") / gaps if gaps else None


def looks_of(span: Span, trace: Trace) -> Trace:
    """The span's part of a whole trace."""
    return trace[span.begin.stats.expert_looks : span.end.stats.expert_looks]


def roof_tokens_per_s(read: StepBytes, rates: Rates, requests: int, *, read_ahead: bool = False) -> float:
    """See step_seconds. `read_ahead` counts for steps of few rows: longer ones foresee nothing."""
    ahead = read_ahead and requests <= FORESEEN_ROWS
    dense_s, resident_s = read.dense / rates.hbm, read.resident / rates.hbm
    return requests / step_seconds(dense_s, resident_s, read.cpu / rates.ram, read_ahead=ahead)


def split_ms(span: Span, round_trip_us: float | None) -> dict[str, float]:
    """Where a step's time goes. cpu_experts_ms and host_ms are measured, transport_ms is the time of an empty round
    trip for each job; gpu_ms is the rest of the step: these four add up. cpu_waiting_ms, measured: what passes of a
    step while the CPU has no job.
    """
    cpu = 1e3 * span.per_step("cpu_experts_seconds")
    host = 1e3 * span.per_step("host_seconds")
    transport = 1e-3 * (round_trip_us or 0.0) * span.per_step("cpu_jobs")
    return {
        "cpu_experts_ms": cpu,
        "transport_ms": transport,
        "gpu_ms": 1e3 * span.step_s - cpu - transport - host,
        "host_ms": host,
        "cpu_waiting_ms": 1e3 * span.per_step("cpu_waiting_seconds"),
    }


def placed_figures(span: Span, gpu: GpuPlan, requests: int, placed: StepBytes, rates: Rates) -> dict[str, float | None]:
    roof = roof_tokens_per_s(placed, rates, requests, read_ahead=gpu.read_ahead)
    return {
        "roof_as_placed_tokens_per_s": roof,
        "roof_as_placed_share": span.tokens_per_s / roof,
        "ram_bytes_per_step": placed.cpu,
        "moved_bytes_per_step": span.per_step("expert_moved_bytes"),
    }


def hit_figures(span: Span, trace: Trace | None, gpu: GpuPlan) -> dict[str, float | None]:
    """What was found in VRAM, and what could have been. trace: of the span; without, all of that is, or nothing."""
    if trace is None:
        rate = float(gpu.gpu_only)
        return {"hit_rate": rate, "best_hit_rate": rate}
    slots, choices = [len(ids) for ids in gpu.resident], int(trace.sum())
    best = best_kept(trace, slots, gpu.expert_bytes).hits
    return {"hit_rate": hit_rate(span), "best_hit_rate": best / choices if choices else None}


def figures_of(span: Span, gpu: GpuPlan, requests: int, read: StepBytes, rates: Rates) -> dict[str, float | None]:
    """Where the CPU has every expert: fixed_us_per_layer from a layer's experts to those of the next layer, as the CPU
    measures it; beside_us_per_layer what a step takes beside experts, head and host included, by layers."""
    roof = roof_tokens_per_s(read, rates, requests, read_ahead=gpu.read_ahead)
    layers = len(gpu.resident)
    resident = sum(map(len, gpu.resident))
    beside_s = span.step_s - span.per_step("cpu_experts_seconds")
    return {
        "requests": requests,
        "tokens_per_s": span.tokens_per_s,
        "tokens_per_s_per_request": span.tokens_per_s / requests,
        "step_ms": 1e3 * span.step_s,
        "roof_tokens_per_s": roof,
        "roof_share": span.tokens_per_s / roof,
        "fixed_us_per_layer": None if resident else fixed_us_per_layer(span),
        "beside_us_per_layer": None if resident else 1e6 * beside_s / layers,
        "layers": layers,
        "steps": span.steps,
        "resident_share": resident / sum(gpu.experts),
        "dense_bytes_per_step": read.dense,
        "resident_bytes_per_step": read.resident,
        "cpu_bytes_per_step": span.per_step("cpu_weight_bytes"),
        "cpu_jobs_per_step": span.per_step("cpu_jobs"),
        "foreseen_share": foreseen_share(span),
        "hbm_bytes_per_s": rates.hbm,
        "ram_bytes_per_s": rates.ram,
        "pcie_bytes_per_s": rates.pcie,
    }


def uncached_steps(requests: int, uncached_tokens: int, batch_tokens: int) -> int:
    """At most so many steps pass between the first and the last of `requests` to get its first token, where so many
    tokens of each prompt are not cached; one each for their coming one after the other."""
    return ceil(requests * uncached_tokens / max(1, batch_tokens - requests)) + requests
