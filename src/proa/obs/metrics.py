"""Every counter, gauge and histogram, declared once, and their Prometheus text. Never: HTTP, policy, engine types.

OBSERVED are fed by the server as requests pass. SAMPLED are read from the engine's statistics when somebody asks.
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
    """One metric. `name` is without the suffix `_total` that Prometheus adds to counters."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


REQUESTS = Declared("proa_requests", "counter", "HTTP requests by endpoint and outcome", ("endpoint", "outcome"))
REQUEST_SECONDS = Declared(
    "proa_request_seconds", "histogram", "From a request's arrival to the end of its answer", ("endpoint",)
)
FIRST_TOKEN_SECONDS = Declared(
    "proa_time_to_first_token_seconds", "histogram", "From a request's arrival to its first token"
)
INTER_TOKEN_SECONDS = Declared(
    "proa_inter_token_seconds", "histogram", "Between two tokens of one choice, after its first"
)
OBSERVED = (REQUESTS, REQUEST_SECONDS, FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS)

SAMPLED: dict[str, Declared] = {
    "ready": Declared("proa_ready", "gauge", "1 when the model is loaded and requests are taken, else 0"),
    "running": Declared("proa_running_requests", "gauge", "Sequences that take part in steps"),
    "waiting": Declared("proa_waiting_requests", "gauge", "Sequences that wait for their turn"),
    "pages_total": Declared("proa_kv_pages", "gauge", "Pages of the KV cache"),
    "pages_free": Declared("proa_kv_pages_free", "gauge", "KV pages that hold nothing"),
    "pages_cached": Declared(
        "proa_kv_pages_cached", "gauge", "KV pages held only by the prefix cache; free + cached = all when idle"
    ),
    "state_copies": Declared(
        "proa_state_copies", "gauge", "Copies of recurrent states, from which prompts that start alike go on"
    ),
    "steps": Declared("proa_engine_steps", "counter", "Steps of the engine"),
    "schedule_seconds": Declared(
        "proa_engine_schedule_seconds", "counter", "Time of steps: deciding who computes what"
    ),
    "inputs_seconds": Declared("proa_engine_inputs_seconds", "counter", "Time of steps: telling the model what to do"),
    "program_seconds": Declared("proa_engine_program_seconds", "counter", "Time of steps: the model"),
    "sample_seconds": Declared("proa_engine_sample_seconds", "counter", "Time of steps: choosing tokens"),
    "publish_seconds": Declared("proa_engine_publish_seconds", "counter", "Time of steps: telling the server process"),
    "cpu_jobs": Declared("proa_cpu_expert_jobs", "counter", "Times a layer of a step on the GPU called for the CPU"),
    "cpu_weight_bytes": Declared("proa_cpu_expert_bytes", "counter", "Weights of experts that these jobs needed"),
    "cpu_experts_needed": Declared("proa_cpu_experts_needed", "counter", "Experts that these jobs needed, by jobs"),
    "cpu_experts_foreseen": Declared(
        "proa_cpu_experts_foreseen", "counter", "Of these, what was foreseen, and read into caches as far as time was"
    ),
    "cpu_experts_seconds": Declared("proa_cpu_expert_seconds", "counter", "Time of steps: these jobs"),
    "cpu_waiting_seconds": Declared(
        "proa_cpu_waiting_seconds", "counter", "Time the CPU waited for the next of these jobs"
    ),
    "cpu_gaps": Declared("proa_cpu_gaps", "counter", "Times that such a job was the next layer's after the last"),
    "cpu_gap_seconds": Declared("proa_cpu_gap_seconds", "counter", "Time between these two: the GPU's, and the way"),
    "expert_looks": Declared("proa_expert_looks", "counter", "Times that choices of experts were counted"),
    "expert_choices": Declared(
        "proa_expert_choices", "counter", "Choices of experts by tokens, where they are counted"
    ),
    "expert_hits": Declared("proa_expert_hits", "counter", "Of these, choices of experts that were in VRAM"),
    "expert_hit_bytes": Declared("proa_expert_hit_bytes", "counter", "Weights of these, each expert once a step"),
    "expert_missed_bytes": Declared("proa_expert_missed_bytes", "counter", "Weights of the others, once a step"),
    "expert_moved_bytes": Declared("proa_expert_moved_bytes", "counter", "Weights of experts that changed places"),
    "prompt_tokens": Declared("proa_prompt_tokens", "counter", "Prompt tokens, cached ones included"),
    "cached_prompt_tokens": Declared(
        "proa_prefix_hit_tokens", "counter", "Prompt tokens that the prefix cache provided"
    ),
    "generated_tokens": Declared("proa_generated_tokens", "counter", "Tokens generated"),
    "preemptions": Declared("proa_preemptions", "counter", "Times a running sequence had to give way"),
    "context_tokens": Declared("proa_context_tokens", "gauge", "Longest prompt plus answer"),
    "roof_tokens_per_s": Declared(
        "proa_roof_tokens_per_second", "gauge", "Decode limit of one request: memory bandwidth over bytes per token"
    ),
}


class _Sampler(Collector):
    """Asks for the engine's statistics at each scrape. Names that are not known yet are left out."""

    def __init__(self, sample: Callable[[], Mapping[str, float]]) -> None:
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        for key, value in self._sample().items():
            declared = SAMPLED[key]
            family = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
            yield family(declared.name, declared.help, value=value)


class Metrics:
    """The metrics of one server, in a registry of its own.

    `sample()` returns current values by the keys of SAMPLED; another key is a KeyError at the scrape.
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
        """One HTTP request ended. `endpoint` must come from a fixed set, or memory grows with every new one."""
        self._requests.labels(endpoint, outcome).inc()
        self._request_seconds.labels(endpoint).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token_seconds.observe(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens came `seconds` after the one before them."""
        for _ in range(tokens):
            self._inter_token_seconds.observe(seconds / tokens)

    def render(self) -> bytes:
        """Prometheus text, of media type CONTENT_TYPE."""
        return generate_latest(self._registry)
