"""How long a short prompt waits that comes while a long one is computed, beside its time alone, on a GPU. Random
weights in the shape of a real model, no expert in VRAM unless said.

    python benchmarks/probes/prompt_waits.py --shape qwen3-30b-a3b --layers 24 --long 65536 --short 256
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.prompts import random_prompts
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, ModelOptions, SchedulerOptions
from proa.engine.processes.client import EngineClient
from proa.models.families import declare
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

BF16_BYTES = 2


async def first_token_s(engine: EngineClient, prompt: list[int], name: str) -> float:
    begin = time.perf_counter()
    took = 0.0
    request = EngineRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=1, temperature=0.0))
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if event.error:
                raise SystemExit(event.error)
            took = took or time.perf_counter() - begin
    return took


async def measure(asked: argparse.Namespace, folder: str) -> None:
    shape = MODEL_SHAPES[asked.shape].cut(asked.layers)
    (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
    context = asked.long + asked.short + 64
    kv_bytes = declare(shape.config()).spec.kv_bytes_per_token(BF16_BYTES)
    options = EngineOptions(
        model=ModelOptions(dtype="bfloat16", load_format="dummy", dummy_format=asked.format),
        cache=CacheOptions(context=context, kv_memory=2 * context * kv_bytes, prefix_cache=False),
        scheduler=SchedulerOptions(max_running=4),
    )
    options = replace(options, gpus=replace(GpuOptions(), gpu_experts=str(asked.resident)))
    engine = await EngineClient.launch(prepare(folder, options).plan, own_thread=True)
    try:
        await engine.wait_ready()
        longs = random_prompts(shape.vocab, asked.runs + 2, asked.long, seed=1)
        shorts = random_prompts(shape.vocab, 2 * (asked.runs + 2), asked.short, seed=2)
        alone, long_alone, waited, long_beside = [], [], [], []
        for i, long in enumerate(longs):
            alone.append(await first_token_s(engine, shorts[2 * i], f"alone {i}"))
            long_alone.append(await first_token_s(engine, long[::-1], f"long alone {i}"))
            task = asyncio.create_task(first_token_s(engine, long, f"long {i}"))
            await asyncio.sleep(asked.after * long_alone[-1])
            waited.append(await first_token_s(engine, shorts[2 * i + 1], f"short {i}"))
            assert not task.done(), "the long prompt ended first"
            long_beside.append(await task)
    finally:
        await engine.close()
    figures = {"alone_s": alone, "beside_long_s": waited, "long_alone_s": long_alone, "long_s": long_beside}
    median = {name: round(statistics.median(values[2:]), 4) for name, values in figures.items()}
    median["factor"] = round(median["beside_long_s"] / median["alone_s"], 2)
    print(json.dumps({**vars(asked), **median}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--long", type=int, default=65536)
    parser.add_argument("--short", type=int, default=256)
    parser.add_argument("--resident", type=int, default=0, help="experts of each layer in VRAM")
    parser.add_argument("--after", type=float, default=0.2, help="when the short prompt comes, as a share of the long one")
    parser.add_argument("--runs", type=int, default=3)
    with tempfile.TemporaryDirectory(prefix="proa-shape-") as made:
        asyncio.run(measure(parser.parse_args(), made))
