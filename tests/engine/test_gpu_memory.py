"""A GPU engine's memory is within the plan, and does not grow however long it runs."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines import request as asks
from gpu_llm import make_model
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.engine.ipc import Loading, Ready
from proa.plan.plan import Plan
from proa.plan.prepare import prepare
from tiny_gguf import make_tiny_gguf

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # memory that other engines allocate meanwhile would count
ROUND_REQUESTS = 40
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["bfloat16", "Q8_0"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Plan, Engine, Ready, list[Loading]]]:
    """An engine over weights of this stored type: linear layers keep GGUF blocks."""
    gc.collect()  # memory that earlier tests left
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    if request.param == "bfloat16":
        folder = make_model(tmp_path / "tiny", max_position_embeddings=4096)
    else:
        sizes = {"vocab_size": 512, "moe_intermediate_size": 32, "max_position_embeddings": 4096}
        folder = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", request.param, **sizes)
    asked = {
        "dtype": "bfloat16", "gpu": "0", "gpu_experts": "4", "context": 4096, "max_running": 12,
        "max_batch_tokens": 1024,
    }  # fmt: skip
    plan = prepare(str(folder), from_keywords(EngineOptions, **asked), None).plan
    reports: list[Loading] = []
    engine, ready = load_engine(plan, reports.append)
    yield plan, engine, ready, reports
    del engine
    torch.cuda.empty_cache()


def play(engine: Engine, seed: int) -> int:
    """A round of short, long, cancelled and sampled requests in bursts. Returns the number of steps."""
    rng, steps, alive = random.Random(seed), 0, []
    waiting = [
        asks(
            f"{seed}-{i}", [rng.randrange(3, 500) for _ in range(rng.choice((1, 7, 90, 1500)))], rng.randrange(1, 30),
            temperature=rng.choice((0.0, 1.0)), prompt_logprobs=rng.choice((None, None, 2)),
        )
        for i in range(ROUND_REQUESTS)
    ]  # fmt: skip
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.2:
            for _ in range(min(len(waiting), rng.randrange(1, 16))):
                alive.append(waiting[-1].id)
                engine.submit(waiting.pop())
        if alive and rng.random() < 0.05:
            engine.abort(rng.choice(alive))
        events = engine.step()
        assert all(event.finish != "error" for event in events)
        steps += bool(events)
    engine.scheduler.check()
    return steps


def test_all_kernels_are_ready_before_the_first_request(
    loaded: tuple[Plan, Engine, Ready, list[Loading]], caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """Every kernel that any request launches was compiled and loaded before the first one."""
    _, engine, ready, _ = loaded
    row = next(row for row in ready.decisions if row.name == "GPU kernels")
    assert row.got in ("compiled", "kept"), row
    assert play(engine, 11) > 20
    assert not [record.message for record in caplog.records if "was not ready" in record.message]


def test_memory_does_not_grow_and_stays_within_the_plan(loaded: tuple[Plan, Engine, Ready, list[Loading]]) -> None:
    plan, engine, _, _ = loaded
    assert plan.gpu is not None
    vram = plan.gpu.vram
    assert play(engine, 0) > 20  # graphs of all sizes are made
    for bucket in engine.runner.executor._buckets:  # type: ignore[attr-defined]
        for i in range(bucket):
            engine.submit(asks(f"b{bucket}-{i}", [5, 6, 7 + i], 4))
        while engine.has_work:
            engine.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert sum(play(engine, seed) for seed in range(1, 5)) > 200
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before[0]
    assert torch.cuda.memory_reserved() <= before[1] + (32 << 20), "blocks of the largest prefill may come late"
    free, total = torch.cuda.mem_get_info()
    assert total - free <= vram.total_bytes - vram.free_bytes + vram.used_bytes


def test_decode_graphs_are_captured_before_ready(loaded: tuple[Plan, Engine, Ready, list[Loading]]) -> None:
    """Graphs are captured while loading, as the row says; the first request captures no more."""
    _, engine, ready, reports = loaded
    rows = {row.name: row for row in ready.decisions}
    assert rows["first steps"].got == "tried"
    assert rows["doorbell"].got == "kernel"
    tried = [r for r in reports if r.phase == "running warm-up steps"]
    assert tried[0].done_bytes == 0 < tried[0].total_bytes
    executor = engine.runner.executor
    captured = dict(executor._graphs)  # type: ignore[attr-defined]
    assert {key[:2] for key in captured} == {(1, 1), (2, 1), (4, 1)}
    engine.submit(asks("first", [5, 6, 7], 8))
    while engine.has_work:
        engine.step()
    assert dict(executor._graphs) == captured  # type: ignore[attr-defined]


def test_rates_of_co_fetch_make_sense(loaded: tuple[Plan, Engine, Ready, list[Loading]]) -> None:
    """Experts of a few kilobytes: launched one by one, they would be read before the CPU begins."""
    _, _, ready, _ = loaded
    row = next(row for row in ready.decisions if row.name == "co-fetch")
    assert row.got == "on", row.why
    assert " 0.00 " not in row.why


@pytest.mark.alone
@pytest.mark.parametrize("running", [4, 64])
def test_all_in_vram_takes_what_is_planned(running: int) -> None:
    """In a separate process, so that the CUDA context counts. Seen: 12 to 22 MiB over the plan, with a long context."""
    probe = ROOT / "benchmarks/probes/gpu_memory.py"
    command = [sys.executable, str(probe), "--shape=tiny", "--layers=2", f"--max-running={running}", "--json"]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    total = found["parts"]["total"]
    assert total["taken_bytes"] <= total["planned_bytes"], json.dumps(found, indent=1)
    assert done.returncode == 0, done.stderr
