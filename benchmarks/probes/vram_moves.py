"""How soon do short conversations decode as fast as by a plan for short ones, after a long one has ended? And what do
gaps between tokens cost while VRAM moves between KV and experts, and does growing back preempt a request? Random weights;
each engine runs in a process of its own.

    python benchmarks/probes/vram_moves.py --gpu 0 --layers 24 --long 131072 --vram 11G
    python benchmarks/probes/vram_moves.py --tiny --gpu sim:64MiB --long 3000 --short 300 --decode 60 --for 5

`planned_for_short`: --context is one short conversation; tokens/s once they are settled. `vram_moves` on and off, with
the context of the long one: a long conversation; when it has ended, short ones one after another, for --for seconds.
short: [seconds since the long one's end, tokens/s, of planned_for_short, experts in lent pages] of each. gaps: between
tokens of the short ones, median and longest, while the number of experts in lent pages changes and while it does not.
back: then a short conversation decodes while a long prompt comes: its gaps, as times of the median before, and the
preemptions; first_token_s: of the long prompt, against that of the first one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from proa.bench.hybrid_shapes import MODEL_SHAPES, ModelShape
from proa.bench.prompts import random_prompts
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

TINY = ModelShape(
    name="tiny", hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, experts=16, top_k=4, width=64, vocab=512
)
LONG_ANSWER = 16
SETTLED = 3  # short conversations by which the speed of the plan for short ones is measured, after as many others


def shape_of(asked: argparse.Namespace) -> ModelShape:
    return TINY if asked.tiny else MODEL_SHAPES[asked.shape].cut(asked.layers)


def loaded(asked: argparse.Namespace, context: int, moves: str) -> Engine:
    more = {} if asked.vram is None else {"vram": asked.vram}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape_of(asked).config()))
        options: EngineOptions = from_keywords(
            EngineOptions, dtype="bfloat16", load_format="dummy", dummy_format=asked.format, dummy_router="zipf",
            context=context, prefix_cache=asked.prefix_cache, max_running=2, gpu=asked.gpu, vram_moves=moves, **more,
        )  # fmt: skip
        plan = prepare(folder, options).plan
        assert plan.gpu is not None
        print(json.dumps({
            "vram_moves": moves, "context": plan.context_tokens, "kv_bytes": plan.gpu.vram.kv_bytes,
            "resident": sum(map(len, plan.gpu.resident)), "of": sum(plan.gpu.experts),
        }), flush=True)  # fmt: skip
        return load_engine(plan, lambda loading: None)[0]


@dataclass
class Talk:
    """The times of a request's tokens, and the experts in lent pages at each."""

    name: str
    began_s: float
    at_s: list[float] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return (len(self.at_s) - 1) / (self.at_s[-1] - self.at_s[0])

    def gaps(self) -> list[tuple[float, bool]]:
        """Seconds between two tokens, and whether experts came or went meanwhile."""
        times, lent = zip(self.at_s, self.at_s[1:], strict=False), zip(self.lent, self.lent[1:], strict=False)
        return [(b - a, one != other) for (a, b), (one, other) in zip(times, lent, strict=True)]


def submit(engine: Engine, name: str, prompt: list[int], count: int) -> Talk:
    engine.submit(EngineRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=count, temperature=0.0)))
    return Talk(name, time.perf_counter())


def run(engine: Engine, *talks: Talk, until: int | None = None) -> None:
    """Step until all have ended, or the first has `until` tokens."""
    by_name = {talk.name: talk for talk in talks}
    while engine.has_work and (until is None or len(talks[0].at_s) < until):
        for event in engine.step():
            if event.error:
                raise SystemExit(event.error)
            talk = by_name[event.id]
            talk.at_s += [time.perf_counter()] * len(event.tokens)
            talk.lent += [engine.stats().residency.lent_slots] * len(event.tokens)
        if engine.stalls:
            time.sleep(0.001)


def short_talks(engine: Engine, asked: argparse.Namespace, number: int) -> Talk:
    (prompt,) = random_prompts(shape_of(asked).vocab, 1, asked.short - asked.decode, seed=number)
    talk = submit(engine, f"short {number}", prompt, asked.decode)
    run(engine, talk)
    return talk


def planned_for_short(asked: argparse.Namespace) -> float:
    engine = loaded(asked, asked.short, "off")
    talks = [short_talks(engine, asked, number) for number in range(2 * SETTLED)]
    speed = median(talk.tokens_per_s for talk in talks[SETTLED:])
    print(json.dumps({"planned_for_short": round(speed, 2)}), flush=True)
    engine.settle()
    return speed


def after_a_long_one(asked: argparse.Namespace, moves: str, planned: float) -> None:
    engine = loaded(asked, asked.long, moves)
    (prompt,) = random_prompts(shape_of(asked).vocab, 1, asked.long - LONG_ANSWER, seed=1000)
    long = submit(engine, "long", prompt, LONG_ANSWER)
    run(engine, long)
    ended_s, talks = time.perf_counter(), list[Talk]()
    while time.perf_counter() - ended_s < asked.seconds:
        talks.append(short_talks(engine, asked, len(talks)))
    found = [gap for talk in talks for gap in talk.gaps()]
    moving, still = ([gap for gap, moved in found if moved is which] for which in (True, False))
    print(json.dumps({
        "vram_moves": moves,
        "short": [
            [round(talk.began_s - ended_s, 2), round(talk.tokens_per_s, 2), round(talk.tokens_per_s / planned, 3),
             talk.lent[-1]] for talk in talks
        ],
        "gaps_ms": {"moving": of(moving), "still": of(still)},
        "longest_moving_over_median": round(max(moving) / median(still), 2) if moving and still else None,
        "lent_bytes": engine.stats().residency.lent_bytes,
    }), flush=True)  # fmt: skip
    back(engine, asked, moves, long, median(still or moving))
    engine.settle()


def back(engine: Engine, asked: argparse.Namespace, moves: str, first: Talk, gap_s: float) -> None:
    """A long prompt comes while a short conversation decodes."""
    before = engine.stats().scheduler.preemptions
    prompts = random_prompts(shape_of(asked).vocab, 2, asked.long - asked.short - LONG_ANSWER, seed=2000)
    short = submit(engine, "decodes", prompts[0][: asked.short - asked.decode], asked.decode)
    run(engine, short, until=4)
    long = submit(engine, "long again", prompts[1], LONG_ANSWER)
    run(engine, short, long)
    gaps = [gap for gap, _ in short.gaps()]
    print(json.dumps({
        "vram_moves": moves, "back": {
            "gaps_ms": of(gaps), "longest_over_median_before": round(max(gaps) / gap_s, 2),
            "moving_gaps_ms": of([gap for gap, moved in short.gaps() if moved]),
            "first_token_s": [round(talk.at_s[0] - talk.began_s, 3) for talk in (first, long)],
            "preemptions": engine.stats().scheduler.preemptions - before,
            "lent_slots": engine.stats().residency.lent_slots,
        },
    }), flush=True)  # fmt: skip


def of(gaps: list[float]) -> list[float]:
    """[median, longest] in ms."""
    return [round(1e3 * median(gaps), 2), round(1e3 * max(gaps), 2)] if gaps else []


def apart(queue: Any, function: Any, *args: Any) -> None:
    queue.put(function(*args))


def in_process(function: Any, *args: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=apart, args=(queue, function, *args))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__} failed with {process.exitcode}")
    return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--vram", help="most VRAM, such as 11G")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a simulated GPU")
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--long", type=int, default=131072, help="tokens of a long conversation")
    parser.add_argument("--short", type=int, default=4096, help="tokens of a short one, with its answer")
    parser.add_argument("--decode", type=int, default=256, help="tokens of a short one's answer")
    parser.add_argument("--for", type=float, default=30.0, dest="seconds", help="seconds of short ones")
    parser.add_argument("--prefix-cache", action="store_true", help="with the prefix cache, whose copies RAM holds")
    parser.add_argument("--moves", nargs="+", default=["on", "off"], choices=["on", "off"])
    asked = parser.parse_args()
    planned = in_process(planned_for_short, asked)
    for moves in asked.moves:
        in_process(after_a_long_one, asked, moves, planned)


if __name__ == "__main__":
    main()
