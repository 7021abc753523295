"""`proa bench hybrid` with a simulated GPU: its frontend in this process, where it is imported once, and real engines;
once as a program."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, Group

import programs
from proa.bench.hybrid_table import render_beside, render_drift, render_hybrid
from proa.bench.result import Result
from proa.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_engines")

QUICK = ["--shape=tiny", "--context=40", "--output-tokens=12", "--runs=2", "--threads=1"]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Bench = Callable[..., Done]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["proa", "bench", "hybrid", *QUICK, *arguments])
        return Done(main(), *capsys.readouterr())

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_bench_that_is_ended_leaves_no_folder(number: signal.Signals, tmp_path: Path) -> None:
    command = programs.proa("bench", "hybrid", *QUICK, "--gpu=sim:64MiB", "--runs=1000")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        end_s = time.monotonic() + 60
        while not list(tmp_path.glob("proa-shape-*")) and time.monotonic() < end_s and started.poll() is None:
            time.sleep(0.02)
        started.send_signal(number)
        _, errors = started.communicate(timeout=60)
    assert (started.returncode, errors) == (128 + number, "")
    assert list(tmp_path.glob("proa-shape-*")) == []


@pytest.mark.alone
def test_deferred_experts_are_measured_beside_the_exact_path(bench: Bench) -> None:
    """The model has two layers; the first one defers one pair of each token."""
    done = bench("--gpu=sim:64MiB", "--resident=0", "--requests=2", "--deferred-experts=1", "--json")
    assert done.returncode == 0, done.stderr
    exact, late = (json.loads(line)["figures"] for line in done.stdout.splitlines())
    assert (exact["deferred_experts"], late["deferred_experts"]) == (0, 1)
    assert (exact["deferred_pairs_per_step"], exact["cpu_deferred_ms"]) == (0, 0)
    assert late["deferred_pairs_per_step"] == pytest.approx(2, abs=4 / late["steps"])
    assert 0 < late["cpu_deferred_ms"] < late["step_ms"]
    table = table_of(done.stdout, render_hybrid)
    assert "its ms" in table
    assert "lossy" in table


def table_of(lines: str, render: Callable[[Sequence[Result]], Group]) -> str:
    """Format the table that is printed without --json from the output of --json."""
    page = Console(width=200, file=io.StringIO(), record=True)
    page.print(render([msgspec.json.decode(line, type=Result) for line in lines.splitlines()]))
    return page.export_text()


@pytest.mark.alone  # all requests must decode together for some steps
def test_experts_on_the_cpu_beside_a_simulated_gpu(bench: Bench) -> None:
    done = bench("--gpu=sim:64MiB", "--resident=0", "--requests=1,3", "--router=zipf", "--json")
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["figures"]["requests"] for r in results] == [1, 3]
    for found in results:
        figures, split = found["figures"], found["split"]
        assert (found["bench"], found["model"], found["options"]["router"]) == ("hybrid", "tiny", "zipf")
        assert figures["steps"] >= 12
        # Every layer of every step calls for the CPU. Counters are read with a step in flight, so one may be missing.
        lag = 1.001 / figures["steps"]
        assert 2 * (1 - lag) <= figures["cpu_jobs_per_step"] <= 2 * (1 + lag)
        expert_bytes, requests = 3 * 64 * 32 * 2, figures["requests"]
        experts = figures["cpu_bytes_per_step"] / expert_bytes
        assert 2 * 2 * (1 - lag) <= experts <= 2 * min(8, 2 * requests) * (1 + lag)
        assert (figures["resident_share"], figures["layers"]) == (0, 2)
        assert (figures["hit_rate"], figures["best_hit_rate"]) == (0, 0)
        parts = ("cpu_experts_ms", "transport_ms", "gpu_ms", "host_ms")
        # Host time counts only while no step is computed: with a step ahead all of it may be hidden.
        assert split["host_ms"] >= 0
        assert min(value for part, value in split.items() if part != "host_ms") > 0
        assert sum(split[part] for part in parts) == pytest.approx(figures["step_ms"])
        beside_ms = figures["step_ms"] - split["cpu_experts_ms"]
        assert figures["beside_us_per_layer"] == pytest.approx(500 * beside_ms)
        assert 0 < figures["fixed_us_per_layer"] < 1000 * beside_ms, "one of two layers' gaps: the other has the head"
        assert figures["tokens_per_s"] == pytest.approx(1e3 * requests / figures["step_ms"])
        assert 0 < figures["tokens_per_s"] < figures["roof_tokens_per_s"]
        assert figures["predicted_tokens_per_s"] is None, "only for uniform routing"
        assert figures["round_trip_us"] > 0
        assert 0 < figures["ram_least_bytes_per_s"] <= figures["ram_bytes_per_s"] <= figures["ram_most_bytes_per_s"]


def test_hits_and_the_roof_of_what_was_read(bench: Bench) -> None:
    done = bench("--gpu=sim:64MiB", "--resident=50", "--requests=1", "--router=zipf", "--output-tokens=60", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert 0.3 < figures["hit_rate"] < 1
    assert 0.5 < figures["best_hit_rate"] <= 1
    assert figures["ram_bytes_per_step"] == pytest.approx(4 * (1 - figures["hit_rate"]) * 3 * 64 * 32 * 2, rel=0.1)
    assert 0 < figures["tokens_per_s"] < figures["roof_as_placed_tokens_per_s"]


@pytest.mark.alone
def test_a_drift(bench: Bench, sampled: bool) -> None:
    """The hit rate falls when other experts become hot."""
    requests = [2] if sampled else [1, 2]
    done = bench(
        "--gpu=sim:64MiB", "--resident=37.5", f"--requests={','.join(map(str, requests))}", "--router=drift",
        "--drift-tokens=100", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["figures"]["requests"] for r in results] == requests
    for found in results:
        figures = found["figures"]
        assert (found["bench"], figures["drift_tokens"], figures["window_tokens"]) == ("hybrid-drift", 100, 10)
        names = ["before", *(f"at_{i}" for i in range(0, 101, 10))]
        assert [name for name in figures if name.startswith("hit_rate_")] == [f"hit_rate_{name}" for name in names]
        for name in names:
            assert figures[f"tokens_per_s_{name}"] > 0
            for of in ("", "lru_", "best_"):
                assert 0 <= figures[f"{of}hit_rate_{name}"] <= 1
            assert figures[f"best_hit_rate_{name}"] >= figures[f"hit_rate_{name}"] - 0.2
        assert 20 <= figures["tokens_until_good"] <= 100
    assert "90 % of an LRU cache's" in table_of(done.stdout, render_drift)


@pytest.mark.parametrize("limit", ["none", "2x"])
def test_a_prompt_that_arrives_during_decode(limit: str, bench: Bench) -> None:
    done = bench(
        "--gpu=sim:64MiB", "--resident=50", "--requests=1,2", "--prompt-tokens=300", "--max-batch-tokens=150",
        f"--max-itl={limit}", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["figures"]["requests"] for r in results] == [1, 2]
    for found in results:
        figures = found["figures"]
        assert (found["bench"], figures["prompt_tokens"]) == ("hybrid-beside", 300)
        assert figures["gap_ms_limit"] == (None if limit == "none" else pytest.approx(2 * figures["gap_ms_before"]))
        assert figures["prompt_tokens_per_s_alone"] > 0
        assert figures["speed_share"] == pytest.approx(
            figures["prompt_tokens_per_s"] / figures["prompt_tokens_per_s_alone"]
        )
        assert figures["prompt_tokens_per_s"] == pytest.approx(300 / figures["ttft_s"])
        assert figures["gap_ms_before"] > 0
        assert (
            figures["gap_ms_beside"]
            <= figures["gap_ms_p99"]
            <= figures["gap_ms_longest"]
            <= 1e3 * figures["ttft_s"] * 1.1
        )
        assert figures["tokens_per_s_beside"] * figures["ttft_s"] >= (2 if limit == "2x" else 0)
    assert "prompt of 300 tokens; " in table_of(done.stdout, render_beside)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--max-itl=2x"], "--prompt-tokens"), (["--prompt-tokens=9", "--router=drift"], "different measurements")],
)
def test_measurements_that_are_refused(arguments: list[str], says: str, bench: Bench) -> None:
    done = bench("--gpu=sim:64MiB", *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_model_with_recurrent_states(bench: Bench) -> None:
    """Without a prefix cache, the prompt is computed again in each run."""
    done = bench("--shape=tiny-next", "--gpu=sim:64MiB", "--resident=50", "--requests=1", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["steps"] >= 12
    assert 0 < figures["tokens_per_s"] < figures["roof_tokens_per_s"]


def test_latent_attention_and_a_layer_without_experts(bench: Bench) -> None:
    done = bench("--shape=tiny-latent", "--gpu=sim:64MiB", "--resident=50", "--requests=1", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert (figures["layers"], figures["resident_share"]) == (2, 0.5)
    assert 0 < figures["tokens_per_s"] < figures["roof_tokens_per_s"]
    assert 0 < figures["predicted_tokens_per_s"] < 1.02 * figures["roof_tokens_per_s"]


def test_experts_with_biases(bench: Bench) -> None:
    done = bench("--shape=tiny-oss", "--gpu=sim:64MiB", "--resident=50", "--requests=1", "--format=mxfp4", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["resident_share"] == 0.5
    assert 0 < figures["tokens_per_s"] < figures["roof_tokens_per_s"]


def test_everything_on_the_gpu_and_a_table() -> None:
    """As a program."""
    command = programs.proa("bench", "hybrid", *QUICK, "--gpu=sim:64MiB", "--resident=100", "--requests=1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"experts in VRAM +100 %", done.stdout)
    assert "experts of the CPU 0 B" in done.stdout


@pytest.mark.parametrize(("form", "bits"), [("int4", 4.5), ("mxfp4", 4.25)])
def test_experts_of_another_format(form: str, bits: float, bench: Bench) -> None:
    done = bench("--gpu=sim:64MiB", "--resident=50", "--requests=1", f"--format={form}", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    expert_bytes = 3 * 64 * 32 * bits / 8
    assert figures["resident_share"] == 0.5
    assert figures["resident_bytes_per_step"] == pytest.approx(2 * 4 * (1 - 0.75) * expert_bytes, rel=0.1)
    assert 0 < figures["cpu_bytes_per_step"] <= 2 * 2 * expert_bytes * 1.1  # scales fill up their lines


def test_a_drift_needs_some_resident_experts(bench: Bench) -> None:
    done = bench("--gpu=sim:64MiB", "--resident=100", "--router=drift")
    assert done.returncode == 2
    assert "--router drift has no effect" in done.stderr


def test_a_gpu_is_required(bench: Bench) -> None:
    done = bench("--gpu=none")
    assert done.returncode == 2
    assert "--gpu sim:" in done.stderr
