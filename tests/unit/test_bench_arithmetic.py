"""Benchmarks: computation of figures, prompts, and the JSON and table of a result."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fakes import make_plan
from proa.bench.hybrid import HybridOptions
from proa.bench.latency import LatencyOptions, latency_figures
from proa.bench.prefill import PrefillOptions
from proa.bench.prompts import distinct_prompts
from proa.bench.restart import OUTPUT_TOKENS, RestartOptions
from proa.bench.result import MeasuredRoof, Result, result
from proa.bench.serve import ServeBenchOptions, arrival_times, serve_figures
from proa.bench.table import numbers_table, render
from proa.bench.timing import Timing, spread_ms
from proa.cli.bench_output import print_each
from proa.config.field import declarations
from proa.config.options import CacheOptions, EngineOptions
from proa.config.value import from_text
from proa.engine.stats import SchedulerStats, Stats, StepSeconds
from proa.errors import ProaError, UsageError
from proa.plan.roof import ROOF_CONTEXT_TOKENS, roof_at

# starts at 10 s; first token after 0.5 s; then one every 0.1 s, with one stall of 0.3 s
TIMING = Timing(10.0, (10.5, 10.6, 10.7, 11.0, 11.1), prompt_tokens=100, output_tokens=5, cached_tokens=16)


def test_one_request() -> None:
    assert TIMING.ttft_s == pytest.approx(0.5)
    assert TIMING.e2e_s == pytest.approx(1.1)
    assert TIMING.tpot_s == pytest.approx(0.6 / 4)
    assert TIMING.gaps_s == pytest.approx((0.1, 0.1, 0.3, 0.1))


def test_a_single_token_has_no_time_per_further_token() -> None:
    assert Timing(0.0, (1.0,), 10, 1).tpot_s is None
    assert Timing(0.0, (1.0,), 10, 5).tpot_s is None  # all in one piece
    assert latency_figures([Timing(0.0, (1.0,), 10, 1)])["decode_tokens_per_s"] is None


@pytest.mark.parametrize(
    ("values", "which", "expected"),
    [
        ([5.0], "p99", 5.0), ([1, 2, 3, 4, 5], "median", 3), ([1, 2], "median", 1.5), ([20, 0, None, 10], "p90", 18),
        ([10, 0], "p10", 1),
    ],
)  # fmt: skip
def test_spread(values: list[float | None], which: str, expected: float) -> None:
    assert spread_ms("itl", values)[f"itl_ms_{which}"] == pytest.approx(1e3 * expected)


def test_spread_of_nothing_is_unknown() -> None:
    assert set(spread_ms("tpot", [None]).values()) == {None}


def test_latency_figures() -> None:
    slow = Timing(0.0, (1.0, 1.2, 1.4), prompt_tokens=100, output_tokens=3, cached_tokens=0)
    fast = Timing(0.0, (0.5, 0.6, 0.7), prompt_tokens=100, output_tokens=3, cached_tokens=32)
    figures = latency_figures([slow, fast])
    assert figures["ttft_ms_median"] == pytest.approx(750)
    assert figures["tpot_ms_p10"] == pytest.approx(110)
    assert figures["prefill_tokens_per_s"] == pytest.approx((100 + 200) / 2)
    assert figures["decode_tokens_per_s"] == pytest.approx(1 / 0.15)
    assert figures["cached_prompt_tokens"] == 32  # hits in the prefix cache are reported


def test_where_a_decode_step_spends_its_time() -> None:
    """Counters at steps 1, 2, 4 and 7; each step has 1 ms of model, and stages of 10, 20, 30 and 40 us."""
    steps = (1, 2, 4, 7)
    stats = tuple(
        Stats(
            SchedulerStats(steps=n),
            StepSeconds(schedule=n * 1e-5, inputs=n * 2e-5, sample=n * 3e-5, publish=n * 4e-5, program=n * 1e-3),
        )
        for n in steps
    )  # fmt: skip
    figures = latency_figures([Timing(0.0, (1.0, 1.1, 1.2, 1.3), 10, 7, stats=stats)])
    stages = {"host": 100, "schedule": 10, "inputs": 20, "sample": 30, "publish": 40, "program": 1000}
    assert {name: figures[f"{name}_us_per_step"] for name in stages} == pytest.approx(stages)
    same = Timing(0.0, (1.0, 1.1), 10, 2, stats=(stats[0], stats[0]))
    assert latency_figures([same])["host_us_per_step"] is None


def test_load_figures() -> None:
    a = Timing(100.0, (100.5, 101.0), prompt_tokens=30, output_tokens=2)
    b = Timing(101.0, (102.0, 104.0), prompt_tokens=30, output_tokens=2)
    figures = serve_figures([a, b], failed=1)
    assert figures["duration_s"] == pytest.approx(4.0)
    assert figures["requests_per_s"] == pytest.approx(0.5)
    assert figures["output_tokens_per_s"] == pytest.approx(1.0)
    assert figures["total_tokens_per_s"] == pytest.approx(16.0)
    assert figures["e2e_ms_median"] == pytest.approx(2000)
    assert (figures["completed_requests"], figures["failed_requests"]) == (2, 1)


@given(text=st.lists(st.integers(0, 30), min_size=40, max_size=200), length=st.integers(2, 500))
def test_prompts_are_exact_and_distinct_from_the_start(text: list[int], length: int) -> None:
    count = len(set(text)) ** 2
    prompts = distinct_prompts(text, count, length)
    assert {len(p) for p in prompts} == {length}
    assert len({tuple(p[:2]) for p in prompts}) == count
    assert set().union(*prompts) <= set(text)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (5, 10)])
def test_prompts_that_cannot_differ_are_refused(count: int, length: int) -> None:
    with pytest.raises(UsageError, match="are impossible"):
        distinct_prompts([7, 8], count, length)


def test_poisson_arrivals_have_the_rate_and_repeat() -> None:
    times = arrival_times(5000, rate_per_s=20.0)
    assert times == sorted(times)
    assert times == arrival_times(5000, rate_per_s=20.0)
    # the sum of n exponential intervals has relative deviation 1/sqrt(n): five of them
    assert times[-1] == pytest.approx(5000 / 20, rel=5 / 5000**0.5)
    assert arrival_times(3, None) == [0.0] * 3
    assert arrival_times(1, 5.0) == [0.0]


def test_the_roof_counts_the_kv_of_the_measured_length() -> None:
    plan = make_plan(num_pages=64, page_tokens=16)  # 2**20 bytes of KV: 1024 a token
    base = plan.roof.bytes_per_token
    assert roof_at(plan, ROOF_CONTEXT_TOKENS) == plan.roof
    assert roof_at(plan, ROOF_CONTEXT_TOKENS + 100).bytes_per_token == base + 100 * 1024
    assert roof_at(plan, 56).bytes_per_token == base - 200 * 1024


def make_result(**more: object) -> Result:
    figures = {**latency_figures([TIMING]), "roof_tokens_per_s": 40.0, "roof_share": 0.166}
    options = LatencyOptions(model="demo", runs=7, engine=EngineOptions(cache=CacheOptions(context=2048)))
    return result("latency", "How long does one request wait?", "demo", options, figures, **more)


def test_json_has_everything_to_repeat_the_run() -> None:
    roof = MeasuredRoof(bytes_per_token=10**9, bandwidth_bytes_per_s=40e9, readings_bytes_per_s=(30e9, 40e9))
    made = make_result(roof=roof, errors={"refused": 2})
    assert roof.tokens_per_s == pytest.approx(40.0)
    shown = json.loads(made.json())
    assert shown["bench"] == "latency"
    assert shown["options"]["runs"] == "7"
    assert shown["options"]["prompt_tokens"] == "128"  # a default of the bench: it may change with the version
    assert shown["options"]["context"] == "2048"
    assert "threads" not in shown["options"]
    assert shown["machine"]["total_bytes"] > 0
    assert shown["roof"]["bandwidth_bytes_per_s"] == 40e9
    assert shown["roof"]["readings_bytes_per_s"] == [30e9, 40e9]
    assert shown["errors"] == {"refused": 2}
    assert shown["date"].endswith("+00:00")
    assert shown["version"]
    assert msgspec.json.decode(made.json(), type=Result) == made


def test_secrets_stay_out_of_the_result() -> None:
    made = result("serve", "?", "m", ServeBenchOptions(api_key="sk-hidden", requests=3), {})
    assert "sk-hidden" not in made.json()
    assert made.options["requests"] == "3"


def test_table_shows_every_figure_with_its_unit() -> None:
    out = io.StringIO()
    roof = MeasuredRoof(bytes_per_token=10**9, bandwidth_bytes_per_s=40e9, readings_bytes_per_s=(30e9, 40e9))
    made = make_result(roof=roof, notes=("quiet machine",), errors={"HTTP 500": 3})
    Console(file=out, width=110).print(render(made))
    text = out.getvalue()
    for shown in ("ttft", "500", "tpot", "150", "decode tokens", "6.67 / s", "roof share", "16.6 %", "quiet machine"):
        assert shown in text
    assert "failed 3 times: HTTP 500" in text
    assert "RAM reads 40.0 GB/s (30.0 GB/s to 40.0 GB/s before and after the runs)" in " ".join(text.split())


@pytest.mark.parametrize(
    "group",
    [LatencyOptions, ServeBenchOptions, RestartOptions, HybridOptions, PrefillOptions, EngineOptions],
    ids=lambda group: group.__name__,
)
def test_numbers_of_tokens_may_be_written_with_k(group: type) -> None:
    for name, declared in declarations(group).items():
        if name.endswith("_tokens") and name != "page_tokens":  # of at most 256
            assert from_text(declared, "1k", declared.spelling) == 1024, name


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_table_cuts_off_no_number(columns: int) -> None:
    table = numbers_table(["requests", *["roof as placed"] * 9])
    table.add_row("1", *["235512"] * 4, *["0.00527"] * 5)
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "\u2026" not in text, "an ellipsis"
    assert sum(map(str.isdigit, text)) == 1 + 6 * 4 + 6 * 5


@pytest.mark.parametrize("ending", [ProaError("The engine died."), KeyboardInterrupt()])
def test_results_before_an_error_are_printed(ending: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(report: Callable[[Result], None]) -> None:
        report(make_result())
        raise ending

    with pytest.raises(type(ending)):
        print_each(measure, lambda results: f"{len(results)} measured", as_json=False)
    assert capsys.readouterr().out == "1 measured\n"


def test_the_demo_has_room_for_the_default_prompts() -> None:
    context = 8192  # of SmolLM2
    restart, serve = RestartOptions(), ServeBenchOptions()
    assert restart.prefix_tokens + restart.suffix_tokens + OUTPUT_TOKENS <= context
    assert serve.input_tokens + serve.output_tokens <= context


def test_options_are_declared_once_each() -> None:
    """Also raises TypeError if a bench's option has the name of an engine option."""
    assert {"model", "url", "prompt_tokens", "runs", "context", "threads"} <= set(declarations(LatencyOptions))
    assert {"model", "url", "concurrency", "rate", "max_running"} <= set(declarations(ServeBenchOptions))
