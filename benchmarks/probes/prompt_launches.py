"""What limits prompts whose experts are streamed: how they are launched? Random weights; one engine in this process, and
variants in turns on the same prompts' lengths.

    python benchmarks/probes/prompt_launches.py --format int4 --tokens 64 128 256 512
    python benchmarks/probes/prompt_launches.py --format int4 --tokens 8192 16384 --ways "op by op" "8 workers"
    python benchmarks/probes/prompt_launches.py --tiny --gpu sim:64MiB,pcie=1GB/s --tokens 16 --ways tries

Ways:
    graphs      as in service
    op by op    without graphs of blocks
    tries       every pass tries whether a division by its routing gains (machine/cost/probes.py)
    N workers   N of the CPU's workers take part, op by op

One JSON line for each length: for each way the median and the least of the ms to the first token, and the CPU time of
the thread that launches, which is the limit if it is as long.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from routed_prompts import add_model_options, loaded, shape_of, times_of

from proa.bench.prompts import random_prompts
from proa.machine.cost.probes import Probes

WARM_UP = 3  # prompts of each length; and the first one of each block is not counted


class _Always(Probes):
    def due(self, tokens: int) -> bool:
        return True


def setter(way: str, executor: Any, streaming: Any, pool: Any) -> Callable[[], None]:
    """Sets the engine's fields for this way."""
    blocks, all_workers = getattr(executor, "_blocks", None), pool.threads
    sizes = () if blocks is None else blocks._sizes
    count = int(way.split()[0]) if way.endswith("workers") else all_workers

    def set_way() -> None:
        pool.use((count - 1,))
        streaming._probes = _Always() if way == "tries" else Probes()
        if way != "tries":
            streaming.probed_layers = 0
        if blocks is not None:
            blocks._sizes = sizes if way == "graphs" else ()

    return set_way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "int4")
    parser.add_argument("--router", default="uniform")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--ways", nargs="+", default=["graphs", "op by op"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=3, help="counted prompts of a way in each round")
    asked = parser.parse_args()
    asked.decode = 8
    engine, hybrid, streaming = loaded(asked, asked.router, 0)
    probed = streaming.probed_layers
    ways = {way: setter(way, engine.runner.executor, streaming, hybrid._ram.pool) for way in asked.ways}
    for tokens in asked.tokens:
        count = WARM_UP + asked.rounds * len(ways) * (1 + asked.prompts)
        prompts = iter(random_prompts(shape_of(asked).vocab, count, tokens, seed=tokens))
        for number in range(WARM_UP):
            times_of(engine, next(prompts), f"{tokens} warm {number}")
        took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(asked.rounds):
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                streaming.probed_layers = probed
                ways[way]()
                for number in range(-1, asked.prompts):
                    began_s = time.thread_time()
                    first_s = times_of(engine, next(prompts), f"{tokens} {turn} {way} {number}")[0]
                    if number >= 0:
                        took[way].append((1e3 * first_s, 1e3 * (time.thread_time() - began_s)))
        print(json.dumps({"format": asked.format, "tokens": tokens, **{
            way: {"ms": round(median(ms for ms, _ in of), 1), "least_ms": round(min(of)[0], 1),
                  "launching_ms": round(median(cpu for _, cpu in of), 1)}
            for way, of in took.items()
        }}), flush=True)  # fmt: skip
    hybrid.close()


if __name__ == "__main__":
    main()
