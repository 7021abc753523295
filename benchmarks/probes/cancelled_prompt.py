"""How long a long prompt that is cancelled while it is computed keeps GPU, ring and CPU: in ms, from the cancellation.

    python benchmarks/probes/cancelled_prompt.py --gpu 0 --prompt 65536 --seconds 60
    python benchmarks/probes/cancelled_prompt.py --gpu sim:256MiB --tiny --layers 4 --prompt 8192 --seconds 20

Rounds cancel a new prompt at a random moment of its computation, and by turns measure
    freed   until the engine has no request, and all pages are free or cached
    short   the first token of a prompt of 16 tokens that is sent then, less what it takes an idle engine (the median)
    next    the same for a prompt of --next tokens, whose experts pass through the ring too
One JSON line; `within` says whether all of freed were within 100 ms. With `"simulated": true` a CPU stood in for the
GPU: the figures say that everything is given back, not how fast a GPU does. The experts of the shape have random
weights, and all of them are in RAM unless --option gpu_experts says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from proa.bench.hybrid_shapes import MODEL_SHAPES, ModelShape
from proa.bench.prompts import random_prompts
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.processes.client import EngineClient
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

LIMIT_MS, POLL_S, MOST_WAIT_S = 100.0, 0.0002, 30.0
SHORT_TOKENS, ALONE = 16, 5  # of the short prompt; how often prompts are timed on an idle engine
STEP_S = 0.03  # some turns of a prompt that is alone (ALONE_S in machine/cost/turns.py): a cancellation may come at any
KINDS = ("freed", "short", "next")
TINY = ModelShape(
    name="tiny", hidden=128, layers=16, heads=4, kv_heads=2, head_dim=32, experts=16, top_k=4, width=64, vocab=512
)


@dataclass
class Probe:
    engine: EngineClient
    tokens: int
    prompts: Iterator[list[int]]  # each is new, of `tokens` tokens
    rng: random.Random
    ids: Iterator[int] = field(default_factory=itertools.count)

    def _request(self, tokens: list[int]) -> EngineRequest:
        sampling = Sampling(max_tokens=1, temperature=0.0, return_progress=True)
        return EngineRequest(id=str(next(self.ids)), tokens=tokens, sampling=sampling)

    async def first_token_ms(self, count: int) -> float:
        """Milliseconds to the first token of a new prompt with `count` tokens."""
        began_s = time.perf_counter()
        async with aclosing(self.engine.generate(self._request(next(self.prompts)[:count]))) as events:
            async for event in events:
                if event.tokens:
                    return 1e3 * (time.perf_counter() - began_s)
        raise RuntimeError("the prompt had no answer")

    async def cancel(self) -> float:
        """Cancel a prompt at a random moment; returns the part of it that was computed."""
        part = self.rng.uniform(0.05, 0.85)
        async with aclosing(self.engine.generate(self._request(next(self.prompts)))) as events:
            async for event in events:
                if event.tokens:
                    raise RuntimeError("the prompt ended before it was cancelled: use a longer one")
                if event.progress is not None and event.progress.computed >= part * self.tokens:
                    await asyncio.sleep(self.rng.uniform(0, STEP_S))
                    break
        return part

    async def freed_ms(self) -> float:
        began_s = time.perf_counter()
        while True:
            of, now_s = self.engine.stats.scheduler, time.perf_counter()
            if not of.running and not of.waiting and of.pages_free + of.pages_cached == of.pages_total:
                return 1e3 * (now_s - began_s)
            if now_s > began_s + MOST_WAIT_S:
                raise RuntimeError(f"not all was given back in {MOST_WAIT_S:.0f} s: {of}")
            await asyncio.sleep(POLL_S)


async def report(probe: Probe, asked: argparse.Namespace) -> None:
    counts = {"short": SHORT_TOKENS, "next": asked.next}
    for count in counts.values():
        await probe.first_token_ms(count)  # kernels, graphs
    alone = {name: statistics.median([await probe.first_token_ms(count) for _ in range(ALONE)])
             for name, count in counts.items()}  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    end_s = time.perf_counter() + asked.seconds
    for name in itertools.cycle(KINDS):
        if time.perf_counter() > end_s and all(found.values()):
            break
        await probe.cancel()
        if name == "freed":
            found[name].append(await probe.freed_ms())
        else:
            found[name].append(await probe.first_token_ms(counts[name]) - alone[name])
        await probe.freed_ms()
    row = {
        "simulated": asked.gpu.startswith("sim"), "prompt": asked.prompt, "layers": asked.layers,
        "streamed_experts": probe.engine.stats.prefill.streamed, "rounds": len(found["freed"]),
        "within": max(found["freed"]) <= LIMIT_MS, **{f"{name}_alone_ms": round(of, 1) for name, of in alone.items()},
    }  # fmt: skip
    for name, of in found.items():
        row |= {f"{name}_p50_ms": round(statistics.median(of), 1), f"{name}_max_ms": round(max(of), 1)}
    print(json.dumps(row))


async def measure(asked: argparse.Namespace, folder: str) -> None:
    shape = (TINY if asked.tiny else MODEL_SHAPES[asked.shape]).cut(asked.layers)
    (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
    options = {
        "context": asked.prompt + 1024, "max_running": 4, "gpu": asked.gpu, "prefix_cache": False, "dtype": "bfloat16",
        "load_format": "dummy", "dummy_format": asked.format, "gpu_experts": "none",
        **dict(text.split("=", 1) for text in asked.option),
    }  # fmt: skip
    plan = prepare(folder, from_keywords(EngineOptions, **options)).plan
    engine = await EngineClient.launch(plan)
    prompts = (random_prompts(shape.vocab, 1, asked.prompt, seed=seed)[0] for seed in itertools.count())
    try:
        await engine.wait_ready()
        await report(Probe(engine, asked.prompt, prompts, random.Random(1)), asked)
    finally:
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--tiny", action="store_true", help="layers that plain torch computes in milliseconds")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--prompt", type=int, default=65536, help="tokens of the prompts that are cancelled")
    parser.add_argument("--next", type=int, default=2048, help="tokens of the prompt that follows")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    with tempfile.TemporaryDirectory(prefix="proa-shape-") as made:
        asyncio.run(measure(parser.parse_args(), made))
