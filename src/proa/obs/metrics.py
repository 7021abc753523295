"""Declares all counters, gauges and histograms, and renders them as Prometheus text.

The server updates OBSERVED with every request. SAMPLED are read from the engine's statistics at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Outcome = Literal["ok", "refused", "failed", "cancelled"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class Declared:
    """Declaration of a metric; `name` lacks the suffix `_total`, which Prometheus adds to counters."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


REQUESTS = Declared("proa_requests", "counter", "HTTP requests, by endpoint and outcome", ("endpoint", "outcome"))
REQUEST_SECONDS = Declared(
    "proa_request_seconds", "histogram", "Seconds from a request's arrival to the end of its response", ("endpoint",)
)
FIRST_TOKEN_SECONDS = Declared(
    "proa_time_to_first_token_seconds", "histogram", "Seconds from a request's arrival to its first token"
)
INTER_TOKEN_SECONDS = Declared("proa_inter_token_seconds", "histogram", "Seconds between two tokens of one choice")
OBSERVED = (REQUESTS, REQUEST_SECONDS, FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS)


def _counter(name: str, text: str) -> Declared:
    return Declared(name, "counter", text)


def _gauge(name: str, text: str) -> Declared:
    return Declared(name, "gauge", text)


SAMPLED: dict[str, Declared] = {
    "ready": _gauge("proa_ready", "1 if the model is loaded and requests are accepted, else 0"),
    "scheduler.running": _gauge("proa_running_requests", "Running sequences"),
    "scheduler.waiting": _gauge("proa_waiting_requests", "Sequences waiting in the queue"),
    "scheduler.pages_total": _gauge("proa_kv_pages", "Pages of the KV cache"),
    "scheduler.pages_free": _gauge("proa_kv_pages_free", "Pages of the KV cache that are free"),
    "scheduler.pages_cached": _gauge(
        "proa_kv_pages_cached", "Pages held only by the prefix cache; when idle, free + cached = all"
    ),
    "scheduler.state_copies": _gauge(
        "proa_state_copies", "Cached copies of recurrent states, for prompts with a common prefix"
    ),
    "scheduler.steps": _counter("proa_engine_steps", "Engine steps"),
    "seconds.schedule": _counter("proa_engine_schedule_seconds", "Seconds of steps spent scheduling"),
    "seconds.inputs": _counter("proa_engine_inputs_seconds", "Seconds of steps spent preparing inputs"),
    "seconds.program": _counter("proa_engine_program_seconds", "Seconds of steps spent in the model"),
    "seconds.sample": _counter("proa_engine_sample_seconds", "Seconds of steps spent sampling"),
    "seconds.publish": _counter("proa_engine_publish_seconds", "Seconds of steps spent sending results"),
    "cpu_experts.jobs": _counter(
        "proa_cpu_expert_jobs", "CPU expert jobs: MoE layers of GPU steps with experts on the CPU"
    ),
    "cpu_experts.weight_bytes": _counter("proa_cpu_expert_bytes", "Bytes of expert weights that CPU expert jobs read"),
    "cpu_experts.needed": _counter("proa_cpu_experts_needed", "Experts computed by CPU expert jobs, summed over jobs"),
    "cpu_experts.foreseen": _counter(
        "proa_cpu_experts_foreseen", "Experts of CPU expert jobs that were predicted, and prefetched if time allowed"
    ),
    "cpu_experts.seconds": _counter("proa_cpu_expert_seconds", "Seconds spent in CPU expert jobs"),
    "cpu_experts.waiting_seconds": _counter(
        "proa_cpu_waiting_seconds", "Seconds the CPU waited for the next expert job"
    ),
    "cpu_experts.gaps": _counter("proa_cpu_gaps", "Pairs of CPU expert jobs of consecutive MoE layers"),
    "cpu_experts.gap_seconds": _counter(
        "proa_cpu_gap_seconds", "Seconds between CPU expert jobs of consecutive MoE layers: GPU work and transport"
    ),
    "cpu_experts.deferred": _counter(
        "proa_cpu_deferred", "(token, expert) pairs of the CPU that were added one MoE layer later"
    ),
    "cpu_experts.deferred_seconds": _counter(
        "proa_cpu_deferred_seconds", "Seconds of CPU expert jobs spent on deferred pairs, after the answer"
    ),
    "residency.looks": _counter("proa_expert_looks", "Times that expert selections were counted"),
    "residency.choices": _counter("proa_expert_choices", "Counted (token, expert) pairs"),
    "residency.hits": _counter("proa_expert_hits", "Counted (token, expert) pairs whose expert was in VRAM"),
    "residency.hit_bytes": _counter("proa_expert_hit_bytes", "Bytes of selected experts in VRAM, each once per step"),
    "residency.missed_bytes": _counter(
        "proa_expert_missed_bytes", "Bytes of selected experts not in VRAM, each once per step"
    ),
    "residency.moved_bytes": _counter(
        "proa_expert_moved_bytes", "Bytes of experts copied between VRAM and RAM, in both directions"
    ),
    "residency.lent_slots": _gauge("proa_lent_expert_slots", "Experts that are in idle KV pages"),
    "residency.lent_bytes": _gauge("proa_lent_bytes", "Bytes of idle KV pages that are lent to experts"),
    "prefill.passes": _counter("proa_prefill_passes", "Prefill steps whose experts in RAM were divided"),
    "prefill.tokens": _counter("proa_prefill_pass_tokens", "Tokens of prefill steps whose experts in RAM were divided"),
    "prefill.streamed": _counter("proa_prefill_streamed_experts", "Experts copied to the GPU for prefill steps"),
    "prefill.left_to_cpu": _counter("proa_prefill_cpu_experts", "Experts in RAM left to the CPU in prefill steps"),
    "prefill.streamed_bytes": _counter("proa_prefill_streamed_bytes", "Bytes of experts copied for prefill steps"),
    "prefill.copy_seconds": _counter(
        "proa_prefill_copy_seconds", "Seconds of copying experts for prefill steps, where measured"
    ),
    "prefill.predicted_seconds": _counter(
        "proa_prefill_predicted_seconds", "Predicted seconds of the prefill steps that were measured"
    ),
    "prefill.took_seconds": _counter("proa_prefill_took_seconds", "Seconds that the measured prefill steps took"),
    "prefill.own_seconds": _counter(
        "proa_prefill_gpu_own_seconds", "Seconds of the GPU in measured prefill steps for all but experts"
    ),
    "prefill.experts_seconds": _counter(
        "proa_prefill_gpu_expert_seconds", "Seconds of the GPU in measured prefill steps for experts"
    ),
    "prefill.waited_seconds": _counter(
        "proa_prefill_copy_wait_seconds", "Seconds that the GPU waited for copies in measured prefill steps"
    ),
    "prefill.cpu_wait_seconds": _counter(
        "proa_prefill_cpu_wait_seconds", "Seconds that the GPU waited for the CPU in measured prefill steps"
    ),
    "prefill.decided_seconds": _counter(
        "proa_prefill_routing_wait_seconds",
        "Seconds that the GPU waited for divisions by routing in measured prefill steps",
    ),
    "prefill.routed": _counter(
        "proa_prefill_routed_steps", "Prefill steps whose experts were divided by their routing"
    ),
    "prefill.promoted": _counter(
        "proa_prefill_promoted_experts", "Experts that prefill steps moved from the ring to slots"
    ),
    "prefill.copy_bytes_per_s": _gauge(
        "proa_prefill_copy_bytes_per_second", "Rate of copies to the GPU by which prompts are divided"
    ),
    "prefill.cpu_expert_seconds": _gauge(
        "proa_prefill_cpu_expert_seconds", "Seconds of the CPU for an expert, by which prompts are divided"
    ),
    "prefill.cpu_pair_seconds": _gauge(
        "proa_prefill_cpu_pair_seconds", "Seconds of the CPU for a (token, expert) pair of an expert"
    ),
    "prefix_files.stored_bytes": _gauge("proa_prefix_file_stored_bytes", "Bytes of files in --prefix-cache-dir"),
    "prefix_files.foreign_files": _gauge(
        "proa_prefix_file_foreign_files",
        "Files in --prefix-cache-dir of other models, KV types or versions, which are ignored",
    ),
    "prefix_files.restore_bytes_per_s": _gauge(
        "proa_prefix_file_restore_bytes_per_second",
        "Rate of restoring from files, with which computing is compared; 0: unknown",
    ),
    "prefix_files.prefill_tokens_per_s": _gauge(
        "proa_prefix_file_prefill_tokens_per_second",
        "Rate of computing prompts, with which restoring from files and from RAM is compared; 0: unknown",
    ),
    "prefix_files.restored_pages": _counter("proa_prefix_file_restored_pages", "KV pages restored from files"),
    "prefix_files.restored_bytes": _counter("proa_prefix_file_restored_bytes", "Bytes of KV read from files"),
    "prefix_files.restore_seconds": _counter("proa_prefix_file_restore_seconds", "Seconds of restoring from files"),
    "prefix_files.refused_restores": _counter(
        "proa_prefix_file_refused_restores",
        "Times that computing was predicted to be quicker than restoring from files or RAM",
    ),
    "prefix_files.written_files": _counter("proa_prefix_file_written_files", "Files of KV written"),
    "prefix_files.written_bytes": _counter("proa_prefix_file_written_bytes", "Bytes of KV written to files"),
    "prefix_files.evicted_files": _counter(
        "proa_prefix_file_evicted_files", "Files deleted because of --prefix-cache-disk"
    ),
    "prefix_files.bad_files": _counter(
        "proa_prefix_file_bad_files", "Files that were truncated, changed or unreadable, which were ignored"
    ),
    "prefix_files.failed_writes": _counter("proa_prefix_file_failed_writes", "Files that could not be written"),
    "prefix_ram.stored_bytes": _gauge(
        "proa_prefix_ram_stored_bytes", "Bytes of RAM that hold runs of KV pages for the prefix cache"
    ),
    "prefix_ram.restore_bytes_per_s": _gauge(
        "proa_prefix_ram_restore_bytes_per_second",
        "Rate of restoring from RAM, with which computing is compared; 0: unknown",
    ),
    "prefix_ram.restored_pages": _counter("proa_prefix_ram_restored_pages", "KV pages restored from RAM"),
    "prefix_ram.restored_bytes": _counter(
        "proa_prefix_ram_restored_bytes", "Bytes of runs of KV pages restored from RAM"
    ),
    "prefix_ram.restore_seconds": _counter("proa_prefix_ram_restore_seconds", "Seconds of restoring from RAM"),
    "prefix_ram.written_runs": _counter("proa_prefix_ram_written_runs", "Runs of KV pages copied to RAM"),
    "prefix_ram.written_bytes": _counter("proa_prefix_ram_written_bytes", "Bytes of KV copied to RAM"),
    "prefix_ram.evicted_runs": _counter(
        "proa_prefix_ram_evicted_runs", "Runs dropped from RAM because of --prefix-cache-ram"
    ),
    "gaps.undisturbed": _counter(
        "proa_decode_gaps_undisturbed", "Gaps between decode steps while no prompt was computed"
    ),
    "gaps.undisturbed_seconds": _counter(
        "proa_decode_gap_undisturbed_seconds", "Seconds of gaps between decode steps while no prompt was computed"
    ),
    "gaps.beside": _counter("proa_decode_gaps_beside", "Gaps between decode steps while a prompt was computed"),
    "gaps.beside_seconds": _counter(
        "proa_decode_gap_beside_seconds", "Seconds of gaps between decode steps while a prompt was computed"
    ),
    "gaps.over_limit": _counter(
        "proa_decode_gaps_over_limit",
        "Gaps between decode steps while a prompt was computed that were longer than --max-itl",
    ),
    "gaps.longest_beside_seconds": _gauge(
        "proa_decode_gap_longest_beside_seconds",
        "Longest gap between decode steps while a prompt was computed, in seconds, since the start",
    ),
    "gaps.limit_seconds": _gauge(
        "proa_decode_gap_limit_seconds", "--max-itl in seconds at the last decode step; 0: none, or unknown"
    ),
    "gaps.given_up": _counter(
        "proa_prefill_beside_given_up",
        "Prompts computed beside decode steps until gaps exceeded --max-itl, and then in turns with them",
    ),
    "scheduler.prompt_tokens": _counter("proa_prompt_tokens", "Prompt tokens, including cached ones"),
    "scheduler.cached_prompt_tokens": _counter("proa_prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    "scheduler.generated_tokens": _counter("proa_generated_tokens", "Generated tokens"),
    "scheduler.preemptions": _counter("proa_preemptions", "Preemptions of running sequences"),
    "context_tokens": _gauge("proa_context_tokens", "Context length in tokens: most tokens of prompt plus answer"),
    "roof_tokens_per_s": _gauge(
        "proa_roof_tokens_per_second", "Upper limit of decode of one request: memory bandwidth / bytes read per token"
    ),
}


class _Sampler(Collector):
    """Reads the engine's statistics at each scrape. Metrics without a value yet are omitted."""

    def __init__(self, sample: Callable[[], Mapping[str, float]]) -> None:
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        for key, value in self._sample().items():
            declared = SAMPLED[key]
            family = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
            yield family(declared.name, declared.help, value=value)


class Metrics:
    """The metrics of one server, in their own registry.

    `sample()` returns current values by the keys of SAMPLED; an unknown key raises KeyError at the scrape.
    """

    def __init__(self, sample: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(REQUESTS.name, REQUESTS.help, REQUESTS.labels, registry=self._registry)
        self._request_seconds = self._histogram(REQUEST_SECONDS)
        self._first_token_seconds = self._histogram(FIRST_TOKEN_SECONDS)
        self._inter_token_seconds = self._histogram(INTER_TOKEN_SECONDS)
        ProcessCollector(registry=self._registry)
        self._registry.register(_Sampler(sample))

    def _histogram(self, declared: Declared) -> Histogram:
        return Histogram(declared.name, declared.help, declared.labels, buckets=_SECONDS, registry=self._registry)

    def request(self, endpoint: str, outcome: Outcome, seconds: float) -> None:
        """Count a finished HTTP request. `endpoint` must be from a fixed set: each new label value takes memory."""
        self._requests.labels(endpoint, outcome).inc()
        self._request_seconds.labels(endpoint).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token_seconds.observe(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """Record `tokens` tokens that arrived together, `seconds` after the previous token."""
        for _ in range(tokens):
            self._inter_token_seconds.observe(seconds / tokens)

    def render(self) -> bytes:
        """Render all metrics as Prometheus text, of media type CONTENT_TYPE."""
        return generate_latest(self._registry)
