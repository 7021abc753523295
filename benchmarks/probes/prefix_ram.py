"""Two conversations that alternate and of which VRAM holds one: time to the first token computed, restored from RAM and
from VRAM; and the time between tokens of a decoding request while the other's pages are stored. Random weights.

    python benchmarks/probes/prefix_ram.py --layers 24 --tokens 16384
    python benchmarks/probes/prefix_ram.py --only-tier --runs 1    # less than a minute: restores against PCIe

restored_*: rates of the restores by the engine's statistics, and their share of PCIe's rate, measured before.
restore_rate.py has restores without an engine.
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

from proa.bench.gpu_rates import measure_gpu
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.prompts import random_prompts
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, ModelOptions, SchedulerOptions
from proa.engine.processes.client import EngineClient
from proa.models.families import declare
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

BF16_BYTES = 2


async def ask(engine: EngineClient, prompt: list[int], name: str, answer: int = 1) -> tuple[float, int, list[float]]:
    """(seconds to the first token, cached tokens, gaps between tokens)."""
    sampling = Sampling(max_tokens=answer, temperature=0.0)
    last, times, cached = time.perf_counter(), list[float](), 0
    async with aclosing(engine.generate(EngineRequest(id=name, tokens=prompt, sampling=sampling))) as events:
        async for event in events:
            if event.error:
                raise SystemExit(event.error)
            cached = event.cached_tokens if event.cached_tokens is not None else cached
            now = time.perf_counter()
            times.append(now - last)
            last = now
    return times[0], cached, times[1:]


async def measure(asked: argparse.Namespace, folder: str, ram: int | None, pcie: float) -> None:
    shape = MODEL_SHAPES[asked.shape].cut(asked.layers)
    (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
    context = asked.tokens + 512
    kv_bytes = declare(shape.config()).spec.kv_bytes_per_token(BF16_BYTES)
    options = EngineOptions(
        model=ModelOptions(dtype="bfloat16", load_format="dummy", dummy_format=asked.format),
        cache=CacheOptions(context=context, kv_memory=int(1.3 * context * kv_bytes), prefix_cache_ram=ram),
        scheduler=SchedulerOptions(max_running=4),
        gpus=replace(GpuOptions(), gpu_experts=asked.experts),
    )
    plan = prepare(folder, options).plan
    print([(row.name, row.got, row.why) for row in plan.decisions if "RAM" in row.name], flush=True)
    engine = await EngineClient.launch(plan, own_thread=True)
    try:
        await engine.wait_ready()
        prompts = random_prompts(shape.vocab, 6, asked.tokens, seed=1)
        found: dict[str, object] = {}
        for i in range(2):  # warm-up
            await ask(engine, prompts[i], f"warm {i}", 8)
        a, b = prompts[2], prompts[3]
        found["computed_s"], _, gaps = await ask(engine, a, "a", 128)
        found["gap_ms_first_64"], found["gap_ms_last_64"] = (
            round(statistics.median(part) * 1e3, 2) for part in (gaps[:64], gaps[64:])
        )
        found["gap_ms_most"] = round(max(gaps) * 1e3, 2)
        await asyncio.sleep(2)
        found["hit_s"], found["hit_tokens"], _ = await ask(engine, a, "a again")
        await ask(engine, b, "b", 8)
        await asyncio.sleep(2)
        before = stats = engine.stats.prefix_ram
        for i, one in enumerate((a, b, a, b)):
            found[f"restored_{i}_s"], found[f"cached_{i}"], _ = await ask(engine, one, f"back {i}")
            last, stats = stats, engine.stats.prefix_ram
            if (seconds := stats.restore_seconds - last.restore_seconds) > 0:
                rate = (stats.restored_bytes - last.restored_bytes) / seconds
                found[f"restored_{i}"] = f"{seconds * 1e3:.1f} ms, {rate / 1e9:.1f} GB/s, {rate / pcie:.0%} of PCIe"
        if (seconds := stats.restore_seconds - before.restore_seconds) > 0:
            rate = (stats.restored_bytes - before.restored_bytes) / seconds
            found["restored_all"] = f"{rate / 1e9:.1f} of {pcie / 1e9:.1f} GB/s, {rate / pcie:.0%}"
        found["stats"] = {name: getattr(stats, name) for name in stats.__struct_fields__}
    finally:
        await engine.close()
    print(json.dumps({"ram": ram, **found}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--experts", default="auto", help="experts of each layer in VRAM")
    parser.add_argument("--runs", type=int, default=2, help="pairs of runs, without and with the tier")
    parser.add_argument("--only-tier", action="store_true", help="no runs without the tier")
    given = parser.parse_args()
    pcie_bytes_per_s = measure_gpu(0).pcie_bytes_per_s
    for size in ((None,) if given.only_tier else (0, None)) * given.runs:
        with tempfile.TemporaryDirectory(prefix="proa-shape-") as made:
            asyncio.run(measure(given, made, size, pcie_bytes_per_s))
