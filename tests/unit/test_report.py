"""The start-up report, progress display and units."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from proa.cli.report import Report, render_plan, render_ready, report_json
from proa.config.parse import GivenOption
from proa.engine.ipc import Ready
from proa.models.ranks import CPU, Mesh
from proa.models.spec import Attention, Block, Mlp, Model, Moe, Rope, Router
from proa.obs.progress import COMPILING, _Lines, show_progress
from proa.obs.units import format_bytes, format_count, format_duration, format_rate
from proa.plan.plan import GpuPlan, MemoryBudget, Plan, Roof, VramBudget, VramRoof
from proa.types import Decision

GIB = 1 << 30
ATTENTION = Attention(hidden=64, heads=4, kv_heads=2, head_dim=16, rope=Rope(16))
MOE = Moe(hidden=64, experts=8, top_k=2, width=32, router=Router("softmax", True))
SPARSE = Model(hidden=64, vocab=100, blocks=(Block(ATTENTION, MOE),) * 3, norm_eps=1e-5, max_positions=128)
DENSE = Model(hidden=64, vocab=100, blocks=(Block(ATTENTION, Mlp(64, 32)),), norm_eps=1e-5, max_positions=128)
PLAN = Plan(
    model="demo", path="/models/demo", load_format="safetensors", dtype="bfloat16", context_tokens=8192,
    page_tokens=16, num_pages=2048, prefix_cache=True, max_running=4, max_batch_tokens=512, max_queued=256,
    max_queued_tokens=4_000_000, threads=2,
    memory=MemoryBudget(
        free_bytes=8 * GIB, reserve_bytes=GIB, weights_bytes=2 * GIB, kv_bytes=GIB, workspace_bytes=GIB // 2,
        loading_bytes=GIB // 8,
    ),
    roof=Roof(bytes_per_token=250_000_000, bandwidth_bytes_per_s=25e9),
    decisions=(
        Decision("context", "auto", "8192 tokens", "the model's own"),
        Decision("odd [bold]names[/bold]", "a", "b", "are not markup"),
    ),
)  # fmt: skip
HYBRID = msgspec.structs.replace(
    PLAN,
    memory=msgspec.structs.replace(PLAN.memory, kv_bytes=0),
    gpus=(GpuPlan(
        index=0, name="Test GPU", placement="uniform", blocks=(0, 1, 2), expert_bytes=(100,) * 3,
        owners=((0, 0, *[CPU] * 6), (0, *[CPU] * 7), (CPU,) * 8), inclusive=True,
        vram=VramBudget(
            total_bytes=25 * GIB, free_bytes=24 * GIB, reserve_bytes=GIB, context_bytes=GIB // 2, dense_bytes=2 * GIB,
            dense_read_bytes=GIB, kv_bytes=4 * GIB, workspace_bytes=GIB, graphs_bytes=GIB // 2, experts_bytes=300,
        ),
    ),),
    roof=Roof(
        bytes_per_token=250_000_000, bandwidth_bytes_per_s=25e9,
        vram=((VramRoof(dense_bytes_per_token=1 << 30, expert_bytes_per_token=1 << 20, bandwidth_bytes_per_s=1e12,
                        source="by its data sheet"),),),
    ),
)  # fmt: skip
READY = Ready(load_seconds=2.0, weights_bytes=2 * GIB, ops={"linear": "reference", "rms_norm": "fast"},
              decode_threads=1, prefill_threads=2,
              peak_rss_bytes=3 * GIB)  # fmt: skip
ASKED = (GivenOption("port", "8001", "--port"), GivenOption("api_key", "(hidden)", "serve.yaml line 3"))


def text_of(*renderables: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_names_model_memory_decisions_roof() -> None:
    shown = text_of(render_plan(Report("1.2", PLAN, SPARSE, ASKED)))
    for part in (
        "Proa 1.2: demo", "3 layers", "2 of 8 experts per token", "active", "/models/demo", "bfloat16",
        "weights 2.00 GiB + KV cache 1.00 GiB", "of 7.00 GiB usable (8.00 GiB free - 1.00 GiB reserve)",
        "100 tokens/s", "238 MiB read per token", "25.0 GB/s",
        "decision", "asked", "got", "why", "8192 tokens", "the model's own", "odd [bold]names[/bold]",
        "port = 8001 (--port)", "api_key = (hidden) (serve.yaml line 3)",
    ):  # fmt: skip
        assert part in shown


def test_with_a_gpu_both_memories_are_shown() -> None:
    shown = text_of(render_plan(Report("1.2", HYBRID, SPARSE)), width=200)
    for part in (
        "dense weights 2.00 GiB + KV cache 4.00 GiB + experts 300 B + workspace 1.00 GiB + CUDA 1.00 GiB",
        "of 23.0 GiB usable on cuda:0, Test GPU",
        "RAM    experts 2.00 GiB + workspace 512 MiB of 7.00 GiB usable",
        "90 tokens/s", "1.00 GiB read per token from VRAM, 1000 GB/s (by its data sheet)",
        "238 MiB read per token, 25.0 GB/s measured from RAM; limited by RAM",
    ):  # fmt: skip
        assert part in shown
    told = report_json(Report("1.2", HYBRID, SPARSE))
    assert told["gpus"][0]["vram"]["usable_bytes"] == 23 * GIB
    shown_gpu = [told["gpus"][0][key] for key in ("device", "gpu_only", "experts", "resident")]
    assert shown_gpu == ["cuda:0", False, [8, 8, 8], [[0, 1], [0], []]]
    assert (told["roof"]["bound_by"], told["roof"]["vram"][0][0]["source"]) == ("RAM", "by its data sheet")
    assert json.loads(json.dumps(told)) == told
    assert report_json(Report("1.2", PLAN, SPARSE))["gpus"] == []


def test_several_ranks_have_a_line_each() -> None:
    """Two stages of one and of two GPUs: the slowest of each counts, and the plan survives the wire."""
    (first,), ((vram,),) = HYBRID.gpus, HYBRID.roof.vram
    slow = msgspec.structs.replace(vram, bandwidth_bytes_per_s=5e11)
    plan = msgspec.structs.replace(
        HYBRID, mesh=Mesh(((2,), (1, 1))),
        gpus=tuple(msgspec.structs.replace(first, rank=r, index=r) for r in range(3)),
        roof=msgspec.structs.replace(HYBRID.roof, vram=((vram,), (vram, slow))),
    )  # fmt: skip
    shown = text_of(render_plan(Report("1.2", plan, SPARSE)), width=200)
    assert [f"usable on cuda:{r}, Test GPU" in shown for r in range(3)] == [True] * 3
    dense_s, experts_s = (3 * nbytes / 1e12 for nbytes in (1 << 30, 1 << 20))
    assert plan.roof.tokens_per_s == pytest.approx(1 / (dense_s + max(experts_s, 0.01)))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert [gpu.resident for gpu in plan.gpus] == [((0, 1), (0,), ()), ((),) * 3, ((),) * 3]
    with pytest.raises(ValueError, match="3 ranks"):
        plan.gpu  # noqa: B018


def test_recurrent_states_are_shown_where_they_lie() -> None:
    states = {"states_bytes": 300 << 20}
    on_cpu = msgspec.structs.replace(PLAN, memory=msgspec.structs.replace(PLAN.memory, **states))
    assert "KV cache 1.00 GiB + recurrent states 300 MiB" in text_of(
        render_plan(Report("1.2", on_cpu, SPARSE)), width=200
    )
    (only,) = HYBRID.gpus
    gpu = msgspec.structs.replace(only, vram=msgspec.structs.replace(only.vram, **states))
    on_gpu = msgspec.structs.replace(HYBRID, gpus=(gpu,))
    assert "KV cache 4.00 GiB + recurrent states 300 MiB" in text_of(
        render_plan(Report("1.2", on_gpu, SPARSE)), width=200
    )
    assert gpu.vram.used_bytes == only.vram.used_bytes + (300 << 20)


def test_a_dense_model_has_no_experts() -> None:
    shown = text_of(render_plan(Report("1.2", PLAN, DENSE)))
    assert "experts" not in shown
    assert "options" not in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_lost_at_any_width(width: int) -> None:
    shown = text_of(render_plan(Report("1.2", PLAN, SPARSE)), width=width)
    assert max(map(len, shown.splitlines())) <= width
    squeezed = "".join(shown.split())
    for word in ("/models/demo", "8192", "markup", "reserve"):
        assert word in squeezed


def test_the_ready_lines_group_ops_by_implementation() -> None:
    shown = text_of(render_ready(READY))
    assert "2.00 GiB in 2.0 s (1.07 GB/s), peak memory 3.00 GiB" in shown
    assert "reference: linear; fast: rms_norm" in shown


def test_facts_of_the_loaded_model_are_shown_and_in_the_json() -> None:
    rows = (Decision("threads for decode", "auto", "14 of 16", "the fastest"),)
    ready = msgspec.structs.replace(READY, decisions=rows)
    shown = text_of(render_ready(ready))
    assert "threads for decode" in shown
    assert "14 of 16" in shown
    told = report_json(Report("1.2", PLAN, SPARSE, ASKED, ready))["ready"]["decisions"]
    assert told == [{"name": "threads for decode", "asked": "auto", "got": "14 of 16", "why": "the fastest"}]
    assert "asked" not in text_of(render_ready(READY))


def test_json_has_one_shape() -> None:
    before = report_json(Report("1.2", PLAN, SPARSE, ASKED))
    after = report_json(Report("1.2", PLAN, SPARSE, ASKED, READY, "http://127.0.0.1:8001", 8001))
    assert set(before) == set(after)
    assert before["ready"] is None
    assert json.loads(json.dumps(after)) == after
    assert after["ready"]["ops"] == {"linear": "reference", "rms_norm": "fast"}
    assert after["memory"]["usable_bytes"] == 7 * GIB
    assert (after["memory"]["kv_pages"], after["memory"]["state_copies"]) == (2048, 0)
    assert after["roof"]["tokens_per_s"] == 100
    assert after["decisions"][0] == {
        "name": "context", "asked": "auto", "got": "8192 tokens", "why": "the model's own"
    }  # fmt: skip
    assert after["options"][1] == {"name": "api_key", "value": "(hidden)", "source": "serve.yaml line 3"}
    assert (after["model"]["experts"], after["model"]["experts_per_token"]) == (8, 2)


def test_the_json_shape_is_documented() -> None:
    import proa.cli.report as module

    for key, value in report_json(Report("1.2", HYBRID, SPARSE, ASKED, READY)).items():
        assert key in (module.__doc__ or "")
        for name in value if isinstance(value, dict) else value[0] if key == "gpus" else ():
            assert name in (module.__doc__ or "")
            for inner in value[0][name] if (key, name) == ("gpus", "vram") else ():
                assert inner in (module.__doc__ or "")


# ---- progress ----


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_lines_have_rate_and_time_left() -> None:
    console, clock = Console(file=io.StringIO(), width=40), Clock()
    lines = _Lines(console, clock)
    for second in range(21):
        clock.now_s = 100.0 + second
        lines("loading weights", second * 50_000_000, 1_000_000_000)
    lines("loading weights", 1_000_000_000, 1_000_000_000)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert shown[0] == "loading weights: 0 B of 954 MiB (0 %)"
    assert shown[1] == "loading weights: 238 MiB of 954 MiB (25 %), 50.0 MB/s, 15 s left"
    assert shown[-1] == "loading weights: 954 MiB of 954 MiB (100 %), 50.0 MB/s"
    assert len(shown) == 5  # 0, 5, 10, 15 and 20 s: the end once


def test_a_resumed_download_does_not_count_what_was_there() -> None:
    console, clock = Console(file=io.StringIO(), width=200), Clock()
    lines = _Lines(console, clock)
    lines("a.safetensors", 900_000_000, 1_000_000_000)
    clock.now_s += 10
    lines("a.safetensors", 950_000_000, 1_000_000_000)
    assert isinstance(console.file, io.StringIO)
    assert "5.00 MB/s, 10 s left" in console.file.getvalue()


def test_phases_of_unknown_size() -> None:
    console = Console(file=io.StringIO(), width=200)
    with show_progress(console) as report:
        report("searching", 0, 0)
        report("tokenizer.json", 10, 10)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == ["searching: 0 B", "tokenizer.json: 10 B of 10 B (100 %)"]


def test_a_terminal_gets_bars() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with show_progress(console) as report:
        report("loading weights", 5 << 20, 10 << 20)
        report("loading weights", 10 << 20, 10 << 20)
    assert isinstance(console.file, io.StringIO)
    assert "loading weights" in console.file.getvalue()
    assert "10.0/10.0 MiB" in console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_kernels_are_counted_not_in_bytes(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal)
    with show_progress(console) as report:
        report(COMPILING, 3, 16)
        report(COMPILING, 16, 16)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert f"{COMPILING}: 3 of 16" in text or terminal
    assert "16/16" in text or not terminal
    assert " B" not in text
    assert "bytes" not in text


# ---- units ----


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10_235, "10.0 KiB"),
        (1 << 20, "1.00 MiB"),
        (1_048_575, "1.00 MiB"), (100 << 20, "100 MiB"), (3 << 29, "1.50 GiB"), (-(3 << 29), "-1.50 GiB"),
        (5 << 40, "5.00 TiB"), (1 << 60, "1024 PiB"),
    ],
)  # fmt: skip
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_other_units() -> None:
    assert [format_rate(r) for r in (25.6e9, 512e6, 1.2e12)] == ["25.6 GB/s", "512 MB/s", "1200 GB/s"]
    assert [format_count(c) for c in (7, 1500, 134_515_008, 30_500_000_000)] == ["7", "1.50K", "135M", "30.5B"]
    times = (0.0124, 0.9996, 3.21, 59.6, 75, 7500, float("inf"))
    assert [format_duration(t) for t in times] == [
        "12 ms", "1000 ms", "3.2 s", "1 min 0 s", "1 min 15 s", "2 h 5 min", "unknown"
    ]  # fmt: skip
