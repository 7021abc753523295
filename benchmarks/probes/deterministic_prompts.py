"""What --deterministic costs prompts whose experts are in RAM, and whether their bits stay: one call on a GPU.

    python benchmarks/probes/deterministic_prompts.py [--gpu 0] [--layers 24] [--tokens 512,2048,4096,16384]

First the time to the first token, with the flag and without it, in pairs: engines take turns, `--rounds` of each. One
JSON line for each length, with the medians of all runs and their ratio. Then an engine with the flag answers the same
requests, greedy and seeded, one by one, all at once in several orders, and another one with a prefix cache likewise;
the last line says how many answers (tokens and log-probabilities) differ from those of each request by itself: 0 is
right. Weights are random, in the shape of a real model; `--shape tiny --layers 2 --gpu sim:64MiB` tries it without a
GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from proa.bench.hybrid import HybridEngineOptions
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.prefill import PrefillOptions, run
from proa.bench.prompts import random_prompts
from proa.config.options import EngineOptions, GpuOptions
from proa.config.parse import from_keywords
from proa.engine.processes.client import EngineClient
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

LENGTHS = (300, 1100, 2048, 2100, 3300, 4096, 5000, 8192)  # some share a beginning; below, at and above whole cells
ORDERS = 3
ANSWER_TOKENS = 8


def measure(asked: argparse.Namespace) -> None:
    found: dict[tuple[int, bool], list[float]] = defaultdict(list)
    notes: dict[bool, list[str]] = {}
    for _, deterministic in itertools.product(range(asked.rounds), (False, True)):
        options = PrefillOptions(
            shape=asked.shape, layers=asked.layers, format=asked.format, tokens=asked.tokens, runs=asked.runs,
            deterministic=deterministic, engine=HybridEngineOptions(gpus=GpuOptions(gpu=asked.gpu)),
        )  # fmt: skip

        def note(result: Any, on: bool = deterministic) -> None:
            found[int(result.figures["tokens"]), on].append(result.figures["ttft_s_median"])
            notes[on] = list(result.notes)

        run(options, note)
    for on, lines in notes.items():
        print(json.dumps({"deterministic": on, "notes": lines}), flush=True)
    for tokens in sorted({tokens for tokens, _ in found}):
        without, with_flag = (statistics.median(found[tokens, on]) for on in (False, True))
        row = {"tokens": tokens, "ttft_s": without, "ttft_s_deterministic": with_flag, "ratio": with_flag / without}
        row |= {"each": {str(on): [round(s, 4) for s in found[tokens, on]] for on in (False, True)}}
        print(json.dumps(row), flush=True)


def requests(vocab: int, lengths: Sequence[int]) -> list[EngineRequest]:
    """Two of each length, of which one shares its beginning with all such others."""
    (stem,) = random_prompts(vocab, 1, max(lengths), seed=1)
    made = []
    for i, tokens in enumerate(lengths):
        (own,) = random_prompts(vocab, 1, tokens, seed=100 + i)
        for shared, prompt in ((True, [*stem[: tokens - 1], own[-1]]), (False, own)):
            sampling = Sampling(
                max_tokens=ANSWER_TOKENS, temperature=0.8 if i % 2 else 0.0, seed=i, logprobs=2, eos_token_ids=()
            )
            made.append(EngineRequest(id=f"{tokens} {shared}", tokens=prompt, sampling=sampling))
    return made


async def answer(engine: EngineClient, request: EngineRequest, after_s: float = 0.0) -> str:
    await asyncio.sleep(after_s)
    tokens, logprobs = list[int](), list[Any]()
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if event.error:
                raise RuntimeError(event.error)
            tokens += event.tokens
            logprobs += event.logprobs or []
    return repr((tokens, logprobs))


async def compare(asked: argparse.Namespace, folder: str, vocab: int) -> None:
    lengths = [tokens // 32 for tokens in LENGTHS] if asked.shape == "tiny" else LENGTHS
    sent, want, differ, total = requests(vocab, lengths), dict[str, str](), list[str](), 0
    for cached in (False, True):
        options = {
            "context": max(lengths) + 64, "max_running": 4, "gpu": asked.gpu, "prefix_cache": cached,
            "dtype": "bfloat16", "load_format": "dummy", "dummy_format": asked.format, "gpu_experts": "none",
            "deterministic": True,
        }  # fmt: skip
        if asked.shape == "tiny":
            options["max_batch_tokens"] = 64
        engine = await EngineClient.launch(prepare(folder, from_keywords(EngineOptions, **options)).plan)
        try:
            await engine.wait_ready()
            alone = {request.id: await answer(engine, request) for request in sent}
            want = want or alone
            differ += [f"{name}, cache {cached}" for name, got in alone.items() if got != want[name]]
            for order in range(ORDERS):
                draw = random.Random(order)
                shuffled = draw.sample(sent, len(sent))
                got = await asyncio.gather(*(answer(engine, one, draw.uniform(0, 0.5)) for one in shuffled))
                total += len(got)
                found = zip(shuffled, got, strict=True)
                differ += [f"{one.id}, cache {cached}, order {order}" for one, text in found if text != want[one.id]]
            stats = engine.stats
        finally:
            await engine.close()
    row = {"answers": total, "differ": len(differ), "which": differ[:10], "passes": stats.prefill.passes}
    print(json.dumps(row | {"cached_tokens": stats.scheduler.cached_prompt_tokens}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--tokens", default="512,2048,4096,16384")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    measure(asked)
    shape = MODEL_SHAPES[asked.shape].cut(asked.layers)
    with tempfile.TemporaryDirectory(prefix="proa-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
        asyncio.run(compare(asked, folder, shape.vocab))


if __name__ == "__main__":
    main()
