"""Which kernels take a prompt's time on the GPU? Random weights; the engine runs in this process, under torch's
profiler.

    python benchmarks/probes/prefill_kernels.py --layers 24 --format int4 --tokens 16384 [--resident 128]

For each length: seconds to the first token without the profiler, then milliseconds by kernel with it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.prompts import random_prompts
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, ModelOptions, SchedulerOptions
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling


def ask(engine: Engine, prompt: list[int], name: str) -> float:
    """Seconds to the first token."""
    began = time.perf_counter()
    engine.submit(EngineRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=1, temperature=0.0)))
    while engine.has_work:
        for event in engine.step():
            if event.error:
                raise SystemExit(event.error)
    return time.perf_counter() - began


def measure(asked: argparse.Namespace, folder: str) -> None:
    shape = MODEL_SHAPES[asked.shape].cut(asked.layers)
    (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
    options = EngineOptions(
        model=ModelOptions(dtype="bfloat16", load_format="dummy", dummy_format=asked.format),
        cache=CacheOptions(context=max(asked.tokens) + 64, prefix_cache=False),
        scheduler=SchedulerOptions(max_running=4, max_batch_tokens=asked.batch),
        gpus=replace(GpuOptions(), gpu_experts=str(asked.resident), prefill=asked.mode),
    )
    plan = prepare(folder, options).plan
    print(f"steps of {plan.max_batch_tokens} tokens, passes of {plan.pass_tokens}")
    engine = load_engine(plan, lambda loading: None)[0]
    for tokens in asked.tokens:
        *prompts, last = random_prompts(shape.vocab, asked.prompts + 1, tokens, seed=tokens)
        took_s = [ask(engine, prompt, f"{tokens} {i}") for i, prompt in enumerate(prompts)]
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            ask(engine, last, f"{tokens} profiled")
        print(f"{tokens} tokens: {' '.join(f'{1e3 * s:.1f}' for s in took_s)} ms")
        rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows)
        for row in rows[: asked.rows]:
            ms = row.self_device_time_total / 1e3
            print(f"  {ms:8.2f} ms {row.self_device_time_total / total:6.1%} {row.count:6} x {row.key[:90]}")
        print(f"  {total / 1e3:8.2f} ms in all", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--resident", type=int, default=0, help="experts of each layer in VRAM")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--batch", type=int, help="most tokens of a step")
    parser.add_argument("--prompts", type=int, default=5, help="timed prompts of each length")
    parser.add_argument("--rows", type=int, default=16)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(asked, folder)


if __name__ == "__main__":
    main()
