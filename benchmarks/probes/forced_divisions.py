"""Is another division of a prompt's experts between PCIe and the CPU faster than the one that the engine takes?

    python benchmarks/probes/forced_divisions.py --layers 24 --gpu 0 --format fp8 --resident 10 --tokens 128 512
    python benchmarks/probes/forced_divisions.py --tiny --gpu sim:64MiB,pcie=1GB/s --tokens 100 --offsets -2 0 2

Random weights, uniform router; an engine in this process, prompts one after the other. After --warm-up prompts of a
length, whose last division is the one taken, other numbers of experts per layer are copied, in random order, --prompts
of each. A JSON line for each number: medians of the time to the first token, of the GPU's own time, of its waits for
copies and for the CPU's sums, what the engine predicts for that division, the CPU's time and GB/s of weights in its
jobs, and GB/s of copies.
"""

from __future__ import annotations

import argparse
import json
import random
from statistics import median
from typing import Any

from routed_prompts import add_model_options, loaded, shape_of, times_of

from proa.bench.prompts import random_prompts
from proa.engine.engine import Engine
from proa.hybrid.model import HybridModel
from proa.machine.cost.prefill import Division


class Forced:
    """Divisions of a pass: the engine's, or the one that copies `count` experts of each layer."""

    def __init__(self, streaming: Any) -> None:
        self._divided, self._streaming = streaming._divided, streaming
        self.count: int | None = None
        self.last: list[Division] = []
        streaming._divided = self
        streaming.probed_layers = 0

    def __call__(self, tokens: int, chunks: int, share: float) -> list[Division]:
        count = self.count
        self.last = self._divided(tokens, chunks, share) if count is None else self._of(count, tokens, chunks)
        return self.last

    def _of(self, count: int, tokens: int, chunks: int) -> list[Division]:
        found, streaming = list[Division](), self._streaming
        for layer in streaming._streamed:
            in_ram = streaming._in_ram(layer)
            every = streaming._divisions(
                in_ram, streaming._layers[layer].experts, streaming._nbytes(layer), tokens, chunks
            )
            found.append(every[min(in_ram, count)])
        return found


def measured(engine: Engine, hybrid: HybridModel, forced: Forced, prompt: list[int], name: str) -> dict[str, float]:
    before = hybrid.counters()
    took_s = times_of(engine, prompt, name)[0]
    now = hybrid.counters()
    return {
        "ttft_ms": 1e3 * took_s,
        "own_ms": 1e3 * (now.own_s - before.own_s),
        "copy_wait_ms": 1e3 * (now.waited_s - before.waited_s),
        "cpu_wait_ms": 1e3 * (now.cpu_wait_s - before.cpu_wait_s),
        "predicted_ms": 1e3 * sum(division.seconds for division in forced.last),
        "cpu_ms": 1e3 * (now.moe_s - before.moe_s),
        "cpu_gbytes_per_s": (now.weight_bytes - before.weight_bytes) / 1e9 / max(1e-9, now.moe_s - before.moe_s),
        "copy_gbytes_per_s": (now.streamed_bytes - before.streamed_bytes) / 1e9 / max(1e-9, now.copy_s - before.copy_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--resident", type=float, default=0, help="percentage of experts in VRAM")
    parser.add_argument(
        "--offsets", type=int, nargs="+", default=[-16, -10, -5, 0, 5, 10], help="of the copied experts"
    )
    parser.add_argument("--prompts", type=int, default=6, help="of each number of copied experts")
    parser.add_argument("--warm-up", type=int, default=8, help="prompts of each length before")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    asked.decode = 1
    shape = shape_of(asked)
    engine, hybrid, streaming = loaded(asked, "uniform", round(shape.experts * asked.resident / 100))
    forced = Forced(streaming)
    for tokens in asked.tokens:
        offsets = asked.offsets * asked.prompts
        random.Random(tokens).shuffle(offsets)
        prompts = iter(random_prompts(shape.vocab, asked.warm_up + len(offsets), tokens, seed=tokens))
        forced.count = None
        for number in range(asked.warm_up):
            times_of(engine, next(prompts), f"{tokens} {number}")
        taken, rows = forced.last[0].streamed, dict[int, list[dict[str, float]]]()
        for number, offset in enumerate(offsets):
            forced.count = max(0, taken + offset)
            row = measured(engine, hybrid, forced, next(prompts), f"{tokens} forced {number}")
            rows.setdefault(forced.count, []).append(row)
        for count, found in sorted(rows.items()):
            medians = {key: round(median(row[key] for row in found), 2) for key in found[0]}
            print(json.dumps({"tokens": tokens, "copied": count, "taken": count == taken, **medians}), flush=True)
    hybrid.close()


if __name__ == "__main__":
    main()
