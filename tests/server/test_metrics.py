"""The declared metrics and their Prometheus text."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proa.engine.stats import SchedulerStats, Stats
from proa.obs.metrics import OBSERVED, SAMPLED, Metrics


def values(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def test_every_engine_statistic_is_declared() -> None:
    assert set(Stats().values()) <= set(SAMPLED)


def test_names_are_unique_and_prefixed() -> None:
    names = [declared.name for declared in (*OBSERVED, *SAMPLED.values())]
    assert len(names) == len(set(names))
    assert all(name.startswith("proa_") and not name.endswith("_total") for name in names)


def test_sampled_values_are_read_at_each_scrape() -> None:
    scheduler = SchedulerStats(running=2, pages_total=64, pages_free=60, pages_cached=3, generated_tokens=7)
    now = [Stats(scheduler)]
    metrics = Metrics(lambda: now[0].values())
    seen = values(metrics)
    assert seen["proa_running_requests", ()] == 2
    assert seen["proa_kv_pages", ()] == 64
    assert seen["proa_kv_pages_free", ()] == 60
    assert seen["proa_kv_pages_cached", ()] == 3
    assert seen["proa_generated_tokens_total", ()] == 7
    now[0] = Stats(msgspec.structs.replace(scheduler, generated_tokens=9))
    assert values(metrics)["proa_generated_tokens_total", ()] == 9


def test_an_undeclared_statistic_is_an_error() -> None:
    with pytest.raises(KeyError):
        Metrics(lambda: {"nonsense": 1.0}).render()


def test_observed_values() -> None:
    metrics = Metrics(dict)
    metrics.request("/v1/completions", "ok", 0.3)
    metrics.request("/v1/completions", "refused", 0.1)
    metrics.first_token(0.2)
    metrics.inter_token(0.3, tokens=3)
    seen = values(metrics)
    ok = (("endpoint", "/v1/completions"), ("outcome", "ok"))
    assert seen["proa_requests_total", ok] == 1
    assert seen["proa_request_seconds_count", (("endpoint", "/v1/completions"),)] == 2
    assert seen["proa_time_to_first_token_seconds_sum", ()] == pytest.approx(0.2)
    assert seen["proa_inter_token_seconds_count", ()] == 3
    assert seen["proa_inter_token_seconds_sum", ()] == pytest.approx(0.3)


def test_two_servers_do_not_share_metrics() -> None:
    one, two = Metrics(dict), Metrics(dict)
    one.first_token(1.0)
    assert values(two)["proa_time_to_first_token_seconds_count", ()] == 0
