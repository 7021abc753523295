"""How far a prompt that is computed beside decoding requests stretches the gap between their tokens, and how much it is
slowed down itself. One JSON line per round and number of requests; each round starts an engine.

    python benchmarks/probes/token_gaps.py demo --prompt 4096 --requests 1,4 --option max_itl=2.5x
    python benchmarks/probes/token_gaps.py --shape qwen3-30b-a3b --layers 4 --format int4 --option max_itl=1.5x

Rounds of several commands, one --rounds each, can alternate in a shell loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from proa.bench.hybrid_beside import Beside, ask_beside
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.prompts import random_prompts
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.processes.client import EngineClient
from proa.hub.locate import locate
from proa.plan.prepare import prepare

CONTEXT_TOKENS, SETTLED = 128, 8  # of a decoding request's prompt; its first tokens, which are not timed


def gaps_ms(run: Beside) -> tuple[list[float], list[float]]:
    """Gaps before the prompt was sent, and while it was computed."""
    before = [b - a for of in run.others for a, b in pairwise(t for t in of[SETTLED:] if t <= run.sent_s)]
    during = [b - a for of in run.others for a, b in pairwise(of) if b > run.sent_s and b <= run.answered_s]
    return [1e3 * gap for gap in before], [1e3 * gap for gap in during]


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
    engine = await EngineClient.launch(plan, own_thread=True)
    try:
        await engine.wait_ready()
        prompts = random_prompts(vocab, 4, CONTEXT_TOKENS, seed=3)
        late = iter(random_prompts(vocab, 99, asked.prompt, seed=asked.seed))
        await ask_beside(engine, prompts[:1], next(late)[: asked.prompt // 4], "warm")
        for count in asked.requests:
            alone = await ask_beside(engine, [], next(late), f"alone {count}")
            run = await ask_beside(engine, prompts[:count], next(late), f"beside {count}")
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
    finally:
        await engine.close()


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
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory(prefix="proa-shape-") as made:
        asyncio.run(measure(parser.parse_args(), made))
