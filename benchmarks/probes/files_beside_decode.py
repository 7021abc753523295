"""How much slower does a request decode while the prefix cache's files are written, and while they are restored?

    python benchmarks/probes/files_beside_decode.py [--gpu none] [--threads N] [--tokens 8192] [--rounds 3]

A model with 24 layers of random weights and 48 KiB of KV per token. One request decodes all the time. Writing: a second
prompt is computed first, then its pages are written. Restoring: in a second engine with the same folder, whose files
have left the page cache, prompts come back one after another. Each phase is compared with the same request alone right
after it, at nearly the same context: median and longest gap between tokens, and tokens per second, in which rare long
gaps count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from proa.bench.hybrid_shapes import ModelShape
from proa.bench.prompts import random_prompts
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.processes.client import EngineClient
from proa.plan.plan import Plan
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

SHAPE = ModelShape(
    name="48 KiB per token", hidden=512, layers=24, heads=8, kv_heads=4, head_dim=128, experts=16, top_k=2, width=256,
    vocab=8192,
)  # fmt: skip
DECODER_TOKENS = 64  # of the decoding request's prompt
STEPS_BEFORE = 50  # until the engine has its rhythm
QUIET_S = 1.0  # without a written byte: all is written
ALONE_S = 2.0


class Decoder:
    """A request that decodes until it is closed, and the times of its tokens."""

    def __init__(self, engine: EngineClient, prompt: list[int], most: int) -> None:
        sampling = Sampling(max_tokens=most, temperature=0.0)
        self._events = engine.generate(EngineRequest(id="decoder", tokens=prompt, sampling=sampling))
        self.times = list[float]()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                self.times.append(time.perf_counter())
                if event.finish is not None:
                    raise SystemExit(f"the decoding request has ended too early: {event.finish} {event.error}")

    async def steps(self, count: int) -> None:
        least = len(self.times) + count
        while len(self.times) < least:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        times = [at for at in self.times if begin_s <= at <= end_s]
        gaps = [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]
        if not gaps:
            raise SystemExit(f"no two tokens in {end_s - begin_s:.2f} s: use more --tokens")
        rate = 1e3 * len(gaps) / sum(gaps)
        return {"median_ms": round(statistics.median(gaps), 3), "longest_ms": round(max(gaps), 2),
                "tokens_per_s": round(rate, 1), "seconds": round(end_s - begin_s, 2)}  # fmt: skip

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def first_token(engine: EngineClient, prompt: list[int], name: str) -> int:
    """Compute a prompt; return its cached tokens when its one token is there."""
    asked = EngineRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=1, temperature=0.0))
    cached = 0
    async with aclosing(engine.generate(asked)) as events:
        async for event in events:
            cached = event.cached_tokens if event.cached_tokens is not None else cached
    return cached


async def written(engine: EngineClient) -> float:
    """Wait until no more is written; return when the last byte was seen."""
    changed_s, seen = time.perf_counter(), -1
    while time.perf_counter() - changed_s < QUIET_S:
        if (now := engine.stats.prefix_files.written_bytes) != seen:
            changed_s, seen = time.perf_counter(), now
        await asyncio.sleep(0.002)
    return changed_s


def report(what: str, decoder: Decoder, busy: tuple[float, float], nbytes: int, **more: object) -> None:
    beside = decoder.between(*busy)
    alone = decoder.between(decoder.times[-1] - ALONE_S, decoder.times[-1])
    slower = alone["tokens_per_s"] / beside["tokens_per_s"] - 1
    rate = nbytes / (busy[1] - busy[0]) / 1e9
    line = {"what": what, "slower": round(slower, 3), "GB/s": round(rate, 2), "beside": beside, "alone": alone, **more}
    print(json.dumps(line), flush=True)


@asynccontextmanager
async def decoding(plan: Plan, prompt: list[int], most: int) -> AsyncIterator[tuple[EngineClient, Decoder]]:
    """An engine with a request that decodes."""
    engine = await EngineClient.launch(plan, own_thread=True)
    try:
        await engine.wait_ready()
        decoder = Decoder(engine, prompt, most)
        await decoder.steps(STEPS_BEFORE)
        yield engine, decoder
        await decoder.close()
    finally:
        await engine.close()


async def measure(plan: Plan, prompts: list[list[int]], first: list[int], most: int, folder: Path) -> None:
    async with decoding(plan, first, most) as (engine, decoder):
        for i, prompt in enumerate(prompts):
            before = engine.stats.prefix_files.written_bytes
            await first_token(engine, prompt, f"new {i}")
            begin_s = time.perf_counter()
            end_s = await written(engine)
            await asyncio.sleep(ALONE_S)
            report("writing", decoder, (begin_s, end_s), engine.stats.prefix_files.written_bytes - before)
    for file in folder.glob("*.kv"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    async with decoding(plan, first, most) as (engine, decoder):
        for i, prompt in enumerate(prompts):
            was = engine.stats.prefix_files
            begin_s = time.perf_counter()
            cached = await first_token(engine, prompt, f"back {i}")
            now = engine.stats.prefix_files
            end_s = begin_s + now.restore_seconds - was.restore_seconds
            await asyncio.sleep(ALONE_S + 0.5)
            report("restoring", decoder, (begin_s, end_s), now.restored_bytes - was.restored_bytes, cached=cached,
                   of=len(prompt))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="none")
    parser.add_argument("--tokens", type=int, default=8192, help="of each prompt that is written and restored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="the engine's --threads; fewer than cores leave some idle")
    parser.add_argument("--decoded", type=int, default=30_000, help="most tokens that the decoding request may have")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="proa-probe-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SHAPE.config()))
        context = max(asked.tokens, asked.decoded) + 256
        options = from_keywords(
            EngineOptions, dtype="bfloat16", load_format="dummy", gpu=asked.gpu, context=context, max_running=2,
            prefix_cache_dir=str(folder / "kept"), prefix_cache_disk=32 << 30, threads=asked.threads,
            kv_memory=(asked.rounds * asked.tokens + context) * 49152,
        )  # fmt: skip
        plan = prepare(str(folder / "model"), options).plan
        (first,) = random_prompts(SHAPE.vocab, 1, DECODER_TOKENS, seed=1)
        prompts = random_prompts(SHAPE.vocab, asked.rounds, asked.tokens, seed=2)
        asyncio.run(measure(plan, prompts, first, asked.decoded, folder / "kept"))


if __name__ == "__main__":
    main()
