"""What does dividing a prompt by its routing gain, and what do experts gain that move from the ring to their slots?
Random weights; each engine runs in a process of its own.

    python benchmarks/probes/routed_prompts.py --layers 24 --gpu 0
    python benchmarks/probes/routed_prompts.py --tiny --gpu sim:64MiB,pcie=1GB/s --tokens 16 100 --decode 200

`first_token`: no expert in VRAM; prompts of each length, in blocks divided by their routing ("routed"), beforehand
("before"), and as the engine chooses ("auto"); medians. decided_us: the device's wait in a layer for the host;
unchosen: of the experts that were copied, those that no token chose; auto_routed: of the passes of "auto", those that
were divided by their routing to their end.

`decode_after_a_prompt`: --resident percent in VRAM; a new engine, a prompt of the greatest length, then
--decode tokens: tokens/s of the first 64, of the last 64 (settled), and their ratio; with and without promotions. Of
each 64 tokens: tokens/s, the share of the chosen experts that were in VRAM, MB moved; of the first 64 the five longest
gaps between tokens, in ms, by token (0: the median). With random weights greedy
answers repeat themselves, so that their last tokens choose fewer experts than the prompt did; drawn ones
(--temperature 1) do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from proa.bench.hybrid_shapes import MODEL_SHAPES, ModelShape
from proa.bench.prompts import random_prompts
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.hybrid.model import HybridModel
from proa.hybrid.streaming import Streaming
from proa.machine.cost.prefill import PROBED_LAYERS
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

TINY = ModelShape(
    name="tiny", hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, experts=16, top_k=4, width=64, vocab=512
)
FIRST, WARM_UP = 64, 2  # tokens of an answer whose speed is compared with that of the last ones; prompts of a block


def add_model_options(parser: argparse.ArgumentParser, form: str) -> None:
    """form: the default of --format."""
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--tiny", action="store_true", help="layers that plain torch computes in milliseconds")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--format", default=form)
    parser.add_argument("--gpu", default="0")


def shape_of(asked: argparse.Namespace) -> ModelShape:
    return getattr(asked, "tiny_shape", TINY) if asked.tiny else MODEL_SHAPES[asked.shape].cut(asked.layers)


def loaded(asked: argparse.Namespace, router: str, resident: int) -> tuple[Engine, HybridModel, Streaming]:
    shape = shape_of(asked)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
        options: EngineOptions = from_keywords(
            EngineOptions, dtype="bfloat16", load_format="dummy", dummy_format=asked.format, dummy_router=router,
            context=max(asked.tokens) + asked.decode + 64, prefix_cache=False, max_running=4, gpu=asked.gpu,
            gpu_experts=str(resident), threads=getattr(asked, "threads", None),
        )  # fmt: skip
        engine = load_engine(prepare(folder, options).plan, lambda loading: None)[0]
    hybrid: Any = engine.runner.executor
    hybrid = hybrid._session._session
    assert isinstance(hybrid, HybridModel)
    assert hybrid.streaming is not None, "prompts are not streamed: see `proa plan`"
    return engine, hybrid, hybrid.streaming


def times_of(
    engine: Engine, prompt: list[int], name: str, count: int = 1, *, temperature: float = 0.0,
    told: Callable[[int], None] = lambda tokens: None,
) -> list[float]:  # fmt: skip
    """Seconds from the request to each of its first `count` tokens. told: called whenever tokens have come, with their
    number so far."""
    found, began_s = list[float](), time.perf_counter()
    sampling = Sampling(max_tokens=count, temperature=temperature, seed=1)
    engine.submit(EngineRequest(id=name, tokens=prompt, sampling=sampling))
    while engine.has_work:
        for event in engine.step():
            if event.error:
                raise SystemExit(event.error)
            found += [time.perf_counter() - began_s] * len(event.tokens)
            if event.tokens:
                told(len(found))
    return found


def notes_unchosen(streaming: Streaming) -> list[int]:
    """[copied, of these unchosen], summed over all layers that are divided from now on."""
    route, sums = streaming.route, [0, 0]

    def noted(ids: Any) -> None:
        route(ids)
        one: Any = streaming._pass
        experts = one.groups[one.at].experts
        sums[0] += len(experts)
        sums[1] += int((one.chosen[experts] == 0).sum())

    streaming.route = noted  # type: ignore[method-assign]
    return sums


def first_tokens(asked: argparse.Namespace, router: str) -> None:
    """Each way in two blocks, of which the first prompts warm up: rates and heat follow what was last measured. Before
    divisions by routing, an engine without experts in VRAM had no heat: nor has "before"."""
    engine, hybrid, streaming = loaded(asked, router, 0)
    sums, layers = notes_unchosen(streaming), len(hybrid.layers)
    for tokens in asked.tokens:
        took: dict[str, list[float]] = {"routed": [], "before": [], "auto": []}
        copied, routed, decided_s = dict.fromkeys(took, 0), dict.fromkeys(took, 0), list[float]()
        prompts = iter(random_prompts(shape_of(asked).vocab, 6 * (asked.prompts + WARM_UP), tokens))
        for block, how in enumerate(("routed", "before", "auto", "auto", "before", "routed")):
            streaming.probed_layers = {"routed": layers + 1, "before": 0, "auto": PROBED_LAYERS}[how]
            for number in range(-WARM_UP, asked.prompts):
                before, sums[:] = hybrid.counters(), sums if number > 0 else [0, 0]
                if how == "before":
                    streaming._seen = None
                took_s = times_of(engine, next(prompts), f"{tokens} {block} {number}")[0]
                now = hybrid.counters()
                if number < 0:
                    continue
                took[how].append(took_s)
                copied[how] += now.streamed - before.streamed
                routed[how] += now.routed - before.routed
                if how == "routed":
                    decided_s.append(now.decided_s - before.decided_s)
                    unchosen = sums[1] / max(1, sums[0])
        print(json.dumps({
            "first_token": router, "format": asked.format, "tokens": tokens,
            **{f"{how}_ms": round(1e3 * median(found), 2) for how, found in took.items()},
            "before_over_routed": round(median(took["before"]) / median(took["routed"]), 4),
            **{f"{how}_copied": round(count / (2 * asked.prompts * layers), 1) for how, count in copied.items()},
            "decided_us": round(1e6 * median(decided_s) / layers, 1), "unchosen": round(unchosen, 4),
            "auto_routed": routed["auto"] / (2 * asked.prompts),
        }), flush=True)  # fmt: skip
    hybrid.close()


def longest_gaps(at_s: list[float]) -> list[tuple[int, float]]:
    """The five longest gaps between tokens, (token, ms), and their median as token 0."""
    gaps = [(round(1e3 * (b - a), 2), at) for at, (a, b) in enumerate(pairwise(at_s), 1)]
    longest = [(at, gap) for gap, at in sorted(gaps, reverse=True)[:5]]
    return [*longest, (0, median(gap for gap, _ in gaps))]


def after_a_prompt(asked: argparse.Namespace, promotes: bool) -> None:
    resident = round(shape_of(asked).experts * asked.resident / 100)
    engine, hybrid, streaming = loaded(asked, "zipf", resident)
    if not promotes:
        streaming.promotions = None
    tokens = max(asked.tokens)
    (prompt,) = random_prompts(shape_of(asked).vocab, 1, tokens)
    seen: list[Any] = []

    def counted(tokens: int) -> None:
        if tokens % FIRST == 1:
            seen.append(hybrid.counters())

    at_s = times_of(engine, prompt, "long", asked.decode, temperature=asked.temperature, told=counted)
    windows = [
        [round(FIRST / (at_s[64 * (i + 1)] - at_s[64 * i]), 1),
         round((b.hits - a.hits) / max(1, b.choices - a.choices), 3), round((b.moved_bytes - a.moved_bytes) / 1e6)]
        for i, (a, b) in enumerate(pairwise(seen))
    ]  # fmt: skip
    first, last = (FIRST / (at_s[end] - at_s[end - FIRST]) for end in (FIRST, len(at_s) - 1))
    now = hybrid.counters()
    print(json.dumps({
        "decode_after_a_prompt": promotes, "format": asked.format, "tokens": tokens, "resident": resident,
        "ram_has_all": hybrid._placement.inclusive, "passes": now.passes, "routed": now.routed,
        "promoted": now.promoted, "moved_bytes": now.moved_bytes,
        "first_token_ms": round(1e3 * at_s[0], 1), "first_64_tokens_per_s": round(first, 2),
        "settled_tokens_per_s": round(last, 2), "of_settled": round(first / last, 4),
        "temperature": asked.temperature, "windows": windows, "longest_gaps": longest_gaps(at_s[: FIRST + 1]),
    }), flush=True)  # fmt: skip
    hybrid.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 512, 2048, 4096])
    parser.add_argument("--prompts", type=int, default=3, help="timed prompts of each block")
    parser.add_argument("--resident", type=float, default=25, help="percentage of experts in VRAM, for decode")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answer after a prompt")
    parser.add_argument("--only", nargs="+", default=["first", "after"], choices=["first", "after"])
    parser.add_argument("--decode", type=int, default=512, help="tokens of an answer, at least 129")
    asked = parser.parse_args()
    runs = [(first_tokens, "zipf"), (first_tokens, "uniform"), (after_a_prompt, True), (after_a_prompt, False)]
    for run, argument in runs if "first" in asked.only else runs[2:]:
        if run is after_a_prompt and "after" not in asked.only:
            continue
        process = multiprocessing.get_context("spawn").Process(target=run, args=(asked, argument))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{run.__name__} {argument}: exit code {process.exitcode}")


if __name__ == "__main__":
    main()
