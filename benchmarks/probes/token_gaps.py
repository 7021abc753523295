"""How far a prompt that is computed beside decoding requests stretches the gap between their tokens, and how much it is
slowed down itself. One JSON line per number of requests.

    python benchmarks/probes/token_gaps.py demo --prompt 4096 --requests 1,4 --option max_itl=2.5x
    python benchmarks/probes/token_gaps.py --shape qwen3-30b-a3b --layers 4 --format int4 --option max_itl=1.5x

With --cpu-time the engine runs in this process, in one thread, and all times, its own measurements included, are CPU
time: on a busy machine, waits for a CPU do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from proa.bench.hybrid_beside import BEFORE_TOKENS, MOST_TOKENS, Beside, ask_beside
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.prompts import random_prompts
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.engine.processes.client import EngineClient
from proa.hub.locate import locate
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

CONTEXT_TOKENS, SETTLED = 128, 8  # of a decoding request's prompt; its first tokens, which are not timed


def gaps_ms(run: Beside) -> tuple[list[float], list[float]]:
    """Gaps before the prompt was sent, and while it was computed."""
    before = [b - a for of in run.others for a, b in pairwise(t for t in of[SETTLED:] if t <= run.sent_s)]
    during = [b - a for of in run.others for a, b in pairwise(of) if b > run.sent_s and b <= run.answered_s]
    return [1e3 * gap for gap in before], [1e3 * gap for gap in during]


class InProcess:
    """The engine in this thread, with CPU time for its clock."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def ask_beside(self, prompts: list[list[int]], late: list[int], run: str) -> Beside:
        moments: dict[str, list[float]] = {f"{run} {i}": [] for i in range(len(prompts))}
        for name, prompt in zip(moments, prompts, strict=True):
            self._submit(name, prompt, MOST_TOKENS)
        while any(len(of) < BEFORE_TOKENS for of in moments.values()):
            self._step(moments)
        sent_s, moments["late"] = time.perf_counter(), []
        self._submit("late", late, 1)
        while not moments["late"]:
            self._step(moments)
        (answered_s,) = moments.pop("late")
        for name in moments:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()
        return Beside(sent_s, answered_s, list(moments.values()))

    def _submit(self, name: str, tokens: list[int], most: int) -> None:
        self.engine.submit(EngineRequest(id=name, tokens=tokens, sampling=Sampling(max_tokens=most, temperature=0.0)))

    def _step(self, moments: dict[str, list[float]]) -> None:
        events = self.engine.step()
        now_s = time.perf_counter()
        for event in events:
            moments[event.id] += [now_s] * len(event.tokens)


async def measure(asked: argparse.Namespace, folder: str) -> None:
    given = dict(text.split("=", 1) for text in asked.option)
    typed = {name: float(value) if name == "prefill_share" else value for name, value in given.items()}
    common = {"context": 2 * asked.prompt, "max_running": 5, "gpu": asked.gpu, "prefix_cache": False}
    common |= {"threads": asked.threads} if asked.threads else {}
    if asked.model:
        path, vocab = str(locate(asked.model, None, lambda text: None)), 480
    else:
        shape = MODEL_SHAPES[asked.shape].cut(asked.layers)
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
        path, vocab = folder, shape.vocab
        common |= {"load_format": "dummy", "dummy_format": asked.format, "dtype": "bfloat16"}
    plan = prepare(path, from_keywords(EngineOptions, **common, **typed)).plan
    if asked.cpu_time:
        time.perf_counter = time.thread_time  # type: ignore[assignment]
        ask = InProcess(load_engine(plan, lambda loading: None)[0]).ask_beside
        await report(asked, ask, vocab)
        return
    engine = await EngineClient.launch(plan, own_thread=True)
    try:
        await engine.wait_ready()
        await report(asked, partial(ask_beside, engine), vocab)
    finally:
        await engine.close()


async def report(asked: argparse.Namespace, ask: Callable[..., Awaitable[Beside]], vocab: int) -> None:
    prompts = random_prompts(vocab, 4, CONTEXT_TOKENS, seed=3)
    late = iter(random_prompts(vocab, 99, asked.prompt, seed=asked.seed))
    await ask(prompts[:1], next(late)[: asked.prompt // 4], "warm")
    for count in asked.requests:
        alone = await ask([], next(late), f"alone {count}")
        run = await ask(prompts[:count], next(late), f"beside {count}")
        before, during = gaps_ms(run)
        alone_s, ttft_s = alone.answered_s - alone.sent_s, run.answered_s - run.sent_s
        during.sort()
        figures = {
            "requests": count,
            "gap_ms": statistics.median(before),
            "p50_ms": statistics.median(during),
            "p99_ms": during[int(0.99 * len(during))],
            "longest_ms": during[-1],
            "mean_ms": statistics.mean(during),
            "alone_tokens_per_s": asked.prompt / alone_s,
            "tokens_per_s": asked.prompt / ttft_s,
            "share": alone_s / ttft_s,
            "gaps": len(during),
        }
        print(json.dumps({"option": asked.option, **{k: round(v, 3) for k, v in figures.items()}}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: random weights in the shape of --shape")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--gpu", default="none")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens; at least 2200")
    parser.add_argument("--requests", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4])
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the engine")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="needs --threads 1")
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory(prefix="proa-shape-") as made:
        asyncio.run(measure(parser.parse_args(), made))
