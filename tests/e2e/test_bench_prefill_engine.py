"""`proa bench prefill` with a simulated GPU: a real engine, its frontend in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from proa.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_engines")

Bench = Callable[..., tuple[int, str, str]]
TINY = ["--shape=tiny", "--gpu=sim:64MiB,pcie=1GB/s", "--threads=1", "--runs=1"]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["proa", "bench", "prefill", *TINY, *arguments])
        return main(), *capsys.readouterr()

    return run


def test_all_experts_in_ram_are_copied_once(bench: Bench) -> None:
    code, out, err = bench("--tokens=20,300", "--mode=stream", "--max-batch-tokens=64", "--json")
    assert code == 0, err
    results = [json.loads(line) for line in out.splitlines()]
    assert [found["figures"]["tokens"] for found in results] == [20, 300]
    for found in results:
        figures = found["figures"]
        assert (found["bench"], found["options"]["mode"]) == ("prefill", "stream")
        assert figures["streamed_share"] == 1.0
        assert figures["streamed_bytes"] == 2 * 8 * 3 * 64 * 32 * 2, "two layers of 8 experts"
        assert figures["ttft_s"] >= figures["pcie_s"] > 0
        assert figures["ttft_s_least"] <= figures["ttft_s"] <= figures["ttft_s_most"]
        assert figures["tokens_per_s"] == pytest.approx(figures["tokens"] / figures["ttft_s"])
        assert figures["ring_bytes"] > 0
        assert 0 < figures["predicted_ttft_s"] <= figures["ttft_s"]  # a simulated GPU is far slower than its limits
        assert 0 <= figures["gpu_idle_share"] < 1
        assert figures["vram_peak_bytes"] is None, "simulated"
        assert figures["vram_planned_bytes"] > figures["ring_bytes"]
        assert any(note.startswith("prefill: stream, ring of") for note in found["notes"])


def test_the_table_behind_a_cached_prefix(bench: Bench) -> None:
    code, out, err = bench("--tokens=40", "--cached=64", "--router=zipf")
    assert code == 0, err
    assert "How long does a prompt take to its first token? tiny" in out
    assert "bound ms" in out
    assert "plan ms" in out
    assert "note: prefill rates: " in out


@pytest.mark.parametrize(
    ("cell", "cached", "note"),
    [
        ("--no-deterministic", 96, "note: 96 of the 100 tokens of --cached came from the prefix cache"),
        ("--deterministic", 0, "note: 0 of the 100 tokens of --cached came from the prefix cache"),
    ],
)
def test_tokens_that_the_cache_does_not_give_are_counted(cell: str, cached: int, note: str, bench: Bench) -> None:
    asked = ["--tokens=40", "--cached=100", cell]
    code, out, err = bench(*asked, "--json")
    assert code == 0, err
    found = json.loads(out)
    figures = found["figures"]
    assert figures["cached_tokens"] == cached
    assert figures["tokens_per_s"] == pytest.approx((40 + 100 - cached) / figures["ttft_s"])
    assert any(f"note: {told}".startswith(note) for told in found["notes"])


def test_rates_that_nothing_measured_are_unknown(bench: Bench) -> None:
    code, out, err = bench("--tokens=40", "--resident=100", "--gpu=sim:64MiB")
    assert code == 0, err
    assert "upload unknown, in service unknown; the CPU: unknown us per expert and unknown us per token" in out
    assert "VRAM unknown of " in out.replace("\n", " ")


def test_long_prompts_are_streamed_with_deterministic(bench: Bench) -> None:
    """Whole cells, of 64 tokens here, are; a short prompt's experts are computed by the CPU."""
    code, out, err = bench("--tokens=40,320", "--deterministic", "--max-batch-tokens=64", "--json")
    assert code == 0, err
    short, long = (json.loads(line)["figures"] for line in out.splitlines())
    assert (short["streamed_bytes"], short["streamed_share"]) == (0, None)
    assert (long["streamed_bytes"], long["streamed_share"]) == (2 * 8 * 3 * 64 * 32 * 2, 1.0)


def test_divisions_by_routing_are_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers of the third pass of a length are divided by its routing; whether all are, depends on what that
    gains."""
    monkeypatch.setattr("proa.bench.prefill.WARM_UP", 2)
    code, out, err = bench("--tokens=40", "--router=zipf", "--json")
    assert code == 0, err
    figures = json.loads(out)["figures"]
    assert figures["routed"] in (0, 1)
    assert figures["decided_s"] > 0
    assert 0 < figures["overlapped_bound_s"] <= figures["bound_s"]


def test_without_streaming_nothing_is_copied(bench: Bench) -> None:
    code, out, err = bench("--tokens=40", "--mode=cpu", "--json")
    assert code == 0, err
    figures = json.loads(out)["figures"]
    assert (figures["streamed_bytes"], figures["streamed_share"], figures["bound_s"]) == (0, None, None)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--tokens=1", "--tokens is '1'."),
        ("--tokens=40,x", "Give numbers from 2 to"),
        ("--mode=both", "--mode"),
        ("--gpu=none", "No GPU is used"),
        ("--prefill=cpu", "Use --mode cpu"),
        ("--resident=50 --gpu-experts=3", "--resident excludes --gpu-experts"),
        ("--gpu=sim:1MiB", "cannot hold tiny even without"),
        ("--gpu=none --shape=deepseek-v3", "No GPU is used"),
    ],
)
def test_what_cannot_be_measured_is_refused(argument: str, words: str, bench: Bench) -> None:
    code, _, err = bench("--tokens=40", *argument.split())
    assert code != 0
    assert words in err


def test_experts_of_the_cpu_leave_the_idle_share_unknown(bench: Bench) -> None:
    code, out, err = bench("--tokens=40", "--mode=cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["figures"]["gpu_idle_share"] is None


@pytest.mark.gpu
@pytest.mark.alone
def test_vram_stays_within_the_plan_on_a_gpu(bench: Bench) -> None:
    code, out, err = bench("--gpu=0", "--tokens=20,300", "--mode=stream", "--json")
    assert code == 0, err
    for figures in (json.loads(line)["figures"] for line in out.splitlines()):
        assert 0 < figures["vram_peak_bytes"] <= figures["vram_planned_bytes"]
        assert 0 < figures["gpu_idle_share"] < 1
