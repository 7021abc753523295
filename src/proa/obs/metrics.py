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

SAMPLED: dict[str, Declared] = {
    "ready": Declared("proa_ready", "gauge", "1 if the model is loaded and requests are accepted, else 0"),
    "scheduler.running": Declared("proa_running_requests", "gauge", "Running sequences"),
    "scheduler.waiting": Declared("proa_waiting_requests", "gauge", "Sequences waiting in the queue"),
    "scheduler.pages_total": Declared("proa_kv_pages", "gauge", "Pages of the KV cache"),
    "scheduler.pages_free": Declared("proa_kv_pages_free", "gauge", "Pages of the KV cache that are free"),
    "scheduler.pages_cached": Declared(
        "proa_kv_pages_cached", "gauge", "Pages held only by the prefix cache; when idle, free + cached = all"
    ),
    "scheduler.state_copies": Declared(
        "proa_state_copies", "gauge", "Cached copies of recurrent states, for prompts with a common prefix"
    ),
    "scheduler.steps": Declared("proa_engine_steps", "counter", "Engine steps"),
    "seconds.schedule": Declared("proa_engine_schedule_seconds", "counter", "Seconds of steps spent scheduling"),
    "seconds.inputs": Declared("proa_engine_inputs_seconds", "counter", "Seconds of steps spent preparing inputs"),
    "seconds.program": Declared("proa_engine_program_seconds", "counter", "Seconds of steps spent in the model"),
    "seconds.sample": Declared("proa_engine_sample_seconds", "counter", "Seconds of steps spent sampling"),
    "seconds.publish": Declared("proa_engine_publish_seconds", "counter", "Seconds of steps spent sending results"),
    "cpu_experts.jobs": Declared(
        "proa_cpu_expert_jobs", "counter", "CPU expert jobs: MoE layers of GPU steps with experts on the CPU"
    ),
    "cpu_experts.weight_bytes": Declared(
        "proa_cpu_expert_bytes", "counter", "Bytes of expert weights that CPU expert jobs read"
    ),
    "cpu_experts.needed": Declared(
        "proa_cpu_experts_needed", "counter", "Experts computed by CPU expert jobs, summed over jobs"
    ),
    "cpu_experts.foreseen": Declared(
        "proa_cpu_experts_foreseen",
        "counter",
        "Experts of CPU expert jobs that were predicted, and prefetched if time allowed",
    ),
    "cpu_experts.seconds": Declared("proa_cpu_expert_seconds", "counter", "Seconds spent in CPU expert jobs"),
    "cpu_experts.waiting_seconds": Declared(
        "proa_cpu_waiting_seconds", "counter", "Seconds the CPU waited for the next expert job"
    ),
    "cpu_experts.gaps": Declared("proa_cpu_gaps", "counter", "Pairs of CPU expert jobs of consecutive MoE layers"),
    "cpu_experts.gap_seconds": Declared(
        "proa_cpu_gap_seconds", "counter", "Seconds between the two jobs of these pairs: GPU work and transport"
    ),
    "cpu_experts.deferred": Declared(
        "proa_cpu_deferred", "counter", "(token, expert) pairs of the CPU that were added one MoE layer later"
    ),
    "cpu_experts.deferred_seconds": Declared(
        "proa_cpu_deferred_seconds", "counter", "Seconds of CPU expert jobs spent on these pairs, after the answer"
    ),
    "residency.looks": Declared("proa_expert_looks", "counter", "Times that expert selections were counted"),
    "residency.choices": Declared("proa_expert_choices", "counter", "Counted (token, expert) pairs"),
    "residency.hits": Declared("proa_expert_hits", "counter", "Counted (token, expert) pairs whose expert was in VRAM"),
    "residency.hit_bytes": Declared(
        "proa_expert_hit_bytes", "counter", "Bytes of selected experts in VRAM, each once per step"
    ),
    "residency.missed_bytes": Declared(
        "proa_expert_missed_bytes", "counter", "Bytes of selected experts not in VRAM, each once per step"
    ),
    "residency.moved_bytes": Declared(
        "proa_expert_moved_bytes", "counter", "Bytes of experts copied between VRAM and RAM, in both directions"
    ),
    "residency.lent_slots": Declared("proa_lent_expert_slots", "gauge", "Experts that are in idle KV pages"),
    "residency.lent_bytes": Declared("proa_lent_bytes", "gauge", "Bytes of idle KV pages that are lent to experts"),
    "prefill.passes": Declared("proa_prefill_passes", "counter", "Prefill steps whose experts in RAM were divided"),
    "prefill.tokens": Declared("proa_prefill_pass_tokens", "counter", "Tokens of these steps"),
    "prefill.streamed": Declared("proa_prefill_streamed_experts", "counter", "Experts copied to the GPU for them"),
    "prefill.left_to_cpu": Declared("proa_prefill_cpu_experts", "counter", "Experts in RAM left to the CPU in them"),
    "prefill.streamed_bytes": Declared("proa_prefill_streamed_bytes", "counter", "Bytes of experts copied for them"),
    "prefill.copy_seconds": Declared("proa_prefill_copy_seconds", "counter", "Seconds of these copies, if measured"),
    "prefill.predicted_seconds": Declared(
        "proa_prefill_predicted_seconds", "counter", "Predicted seconds of these steps, if measured"
    ),
    "prefill.took_seconds": Declared(
        "proa_prefill_took_seconds", "counter", "Seconds that these steps took, if measured"
    ),
    "prefill.own_seconds": Declared(
        "proa_prefill_gpu_own_seconds", "counter", "Seconds of the GPU in these steps for all but experts"
    ),
    "prefill.experts_seconds": Declared(
        "proa_prefill_gpu_expert_seconds", "counter", "Seconds of the GPU in these steps for experts"
    ),
    "prefill.waited_seconds": Declared(
        "proa_prefill_copy_wait_seconds", "counter", "Seconds that the GPU waited for copies in these steps"
    ),
    "prefill.cpu_wait_seconds": Declared(
        "proa_prefill_cpu_wait_seconds", "counter", "Seconds that the GPU waited for the CPU in these steps"
    ),
    "prefill.decided_seconds": Declared(
        "proa_prefill_routing_wait_seconds", "counter", "Seconds that the GPU waited for divisions by routing in them"
    ),
    "prefill.routed": Declared(
        "proa_prefill_routed_steps", "counter", "Prefill steps whose experts were divided by their routing"
    ),
    "prefill.promoted": Declared(
        "proa_prefill_promoted_experts", "counter", "Experts that prefill steps moved from the ring to slots"
    ),
    "prefill.copy_bytes_per_s": Declared(
        "proa_prefill_copy_bytes_per_second", "gauge", "Rate of copies to the GPU by which prompts are divided"
    ),
    "prefill.cpu_expert_seconds": Declared(
        "proa_prefill_cpu_expert_seconds", "gauge", "Seconds of the CPU for an expert, by which prompts are divided"
    ),
    "prefill.cpu_pair_seconds": Declared(
        "proa_prefill_cpu_pair_seconds", "gauge", "Seconds of the CPU for a (token, expert) pair of an expert"
    ),
    "prefix_files.stored_bytes": Declared(
        "proa_prefix_file_stored_bytes", "gauge", "Bytes of files in --prefix-cache-dir"
    ),
    "prefix_files.foreign_files": Declared(
        "proa_prefix_file_foreign_files",
        "gauge",
        "Files there of other models, KV types or versions, which are ignored",
    ),
    "prefix_files.restore_bytes_per_s": Declared(
        "proa_prefix_file_restore_bytes_per_second",
        "gauge",
        "Rate of restoring from files, with which computing is compared; 0: unknown",
    ),
    "prefix_files.prefill_tokens_per_s": Declared(
        "proa_prefix_file_prefill_tokens_per_second",
        "gauge",
        "Rate of computing prompts, with which restoring from files and from RAM is compared; 0: unknown",
    ),
    "prefix_files.restored_pages": Declared(
        "proa_prefix_file_restored_pages", "counter", "KV pages restored from files"
    ),
    "prefix_files.restored_bytes": Declared(
        "proa_prefix_file_restored_bytes", "counter", "Bytes of KV read from files"
    ),
    "prefix_files.restore_seconds": Declared(
        "proa_prefix_file_restore_seconds", "counter", "Seconds of restoring from files"
    ),
    "prefix_files.refused_restores": Declared(
        "proa_prefix_file_refused_restores",
        "counter",
        "Times that computing was predicted to be quicker than restoring from files or RAM",
    ),
    "prefix_files.written_files": Declared("proa_prefix_file_written_files", "counter", "Files of KV written"),
    "prefix_files.written_bytes": Declared("proa_prefix_file_written_bytes", "counter", "Bytes of KV written to files"),
    "prefix_files.evicted_files": Declared(
        "proa_prefix_file_evicted_files", "counter", "Files deleted because of --prefix-cache-disk"
    ),
    "prefix_files.bad_files": Declared(
        "proa_prefix_file_bad_files", "counter", "Files that were truncated, changed or unreadable, which were ignored"
    ),
    "prefix_files.failed_writes": Declared(
        "proa_prefix_file_failed_writes", "counter", "Files that could not be written"
    ),
    "prefix_ram.stored_bytes": Declared(
        "proa_prefix_ram_stored_bytes", "gauge", "Bytes of RAM that hold runs of KV pages for the prefix cache"
    ),
    "prefix_ram.restore_bytes_per_s": Declared(
        "proa_prefix_ram_restore_bytes_per_second",
        "gauge",
        "Rate of restoring from RAM, with which computing is compared; 0: unknown",
    ),
    "prefix_ram.restored_pages": Declared("proa_prefix_ram_restored_pages", "counter", "KV pages restored from RAM"),
    "prefix_ram.restored_bytes": Declared(
        "proa_prefix_ram_restored_bytes", "counter", "Bytes of the runs that were restored from RAM"
    ),
    "prefix_ram.restore_seconds": Declared(
        "proa_prefix_ram_restore_seconds", "counter", "Seconds of restoring from RAM"
    ),
    "prefix_ram.written_runs": Declared("proa_prefix_ram_written_runs", "counter", "Runs of KV pages copied to RAM"),
    "prefix_ram.written_bytes": Declared("proa_prefix_ram_written_bytes", "counter", "Bytes of KV copied to RAM"),
    "prefix_ram.evicted_runs": Declared(
        "proa_prefix_ram_evicted_runs", "counter", "Runs dropped from RAM because of --prefix-cache-ram"
    ),
    "gaps.undisturbed": Declared(
        "proa_decode_gaps_undisturbed", "counter", "Gaps between decode steps while no prompt was computed"
    ),
    "gaps.undisturbed_seconds": Declared("proa_decode_gap_undisturbed_seconds", "counter", "Seconds of these gaps"),
    "gaps.beside": Declared(
        "proa_decode_gaps_beside", "counter", "Gaps between decode steps while a prompt was computed"
    ),
    "gaps.beside_seconds": Declared("proa_decode_gap_beside_seconds", "counter", "Seconds of these gaps"),
    "gaps.over_limit": Declared("proa_decode_gaps_over_limit", "counter", "Of these gaps, those longer than --max-itl"),
    "gaps.longest_beside_seconds": Declared(
        "proa_decode_gap_longest_beside_seconds", "gauge", "Longest of these gaps since the start, in seconds"
    ),
    "gaps.limit_seconds": Declared(
        "proa_decode_gap_limit_seconds", "gauge", "--max-itl in seconds at the last decode step; 0: none, or unknown"
    ),
    "gaps.given_up": Declared(
        "proa_prefill_beside_given_up",
        "counter",
        "Prompts computed beside decode steps until gaps exceeded --max-itl, and then in turns with them",
    ),
    "scheduler.prompt_tokens": Declared("proa_prompt_tokens", "counter", "Prompt tokens, including cached ones"),
    "scheduler.cached_prompt_tokens": Declared(
        "proa_prefix_hit_tokens", "counter", "Prompt tokens found in the prefix cache"
    ),
    "scheduler.generated_tokens": Declared("proa_generated_tokens", "counter", "Generated tokens"),
    "scheduler.preemptions": Declared("proa_preemptions", "counter", "Preemptions of running sequences"),
    "context_tokens": Declared(
        "proa_context_tokens", "gauge", "Context length in tokens: most tokens of prompt plus answer"
    ),
    "roof_tokens_per_s": Declared(
        "proa_roof_tokens_per_second",
        "gauge",
        "Upper limit of decode of one request: memory bandwidth / bytes read per token",
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
