"""What does the server cost for each request? CPU time of its process, by a scripted engine without a model.

    python benchmarks/probes/request_cost.py [--model demo] [--streams 64] [--rounds 15] [--tokens 1 64] [--chat]
        [--profile FILE]

For each number of tokens: microseconds of CPU per request while `--streams` requests come at once, each on its own
kept connection, and the milliseconds until the last one has ended; then the milliseconds of single requests, one after
another. The engine's steps have no pause. Log lines are made and written to /dev/null, as a server writes them to a
file. --profile: write cProfile's figures of the batches, for pstats.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import statistics
import sys
from multiprocessing.connection import Connection

from rich.console import Console
from server_cost import client
from server_rate import batch, request, serving

from proa.obs.log import setup_logging

SINGLE = 100  # requests one after another
WARM_UP = 2  # batches before the counted ones


async def measure(asked: argparse.Namespace, orders: Connection, tokens: int, profile: cProfile.Profile | None) -> None:
    cpu_us, whole_ms, single_ms = list[float](), list[float](), list[float]()
    for number in range(WARM_UP + asked.rounds):
        requests = [request(tokens, chat=asked.chat) for _ in range(asked.streams)]
        if profile is not None and number == WARM_UP:
            profile.enable()
        cpu_s, seconds = await batch(orders, requests)
        if number >= WARM_UP:
            cpu_us.append(1e6 * cpu_s / asked.streams)
            whole_ms.append(1e3 * seconds)
    if profile is not None:
        profile.disable()
    for _ in range(SINGLE):
        single_ms.append(1e3 * (await batch(orders, [request(tokens, chat=asked.chat)]))[1])
    print(
        f"{tokens:4} tokens: {statistics.median(cpu_us):6.0f} us of CPU per request ({min(cpu_us):.0f} to "
        f"{max(cpu_us):.0f}), {asked.streams} at once in {statistics.median(whole_ms):6.1f} ms ({min(whole_ms):.1f} to "
        f"{max(whole_ms):.1f}), one alone in {statistics.median(single_ms):.2f} ms",
        flush=True,
    )


async def run(asked: argparse.Namespace) -> None:
    profile = cProfile.Profile() if asked.profile else None
    async with serving(asked.model, asked.streams, 0.0) as port:
        with client(port) as orders:
            for tokens in asked.tokens:
                await measure(asked, orders, tokens, profile)
    if profile is not None:
        profile.dump_stats(asked.profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--chat", action="store_true", help="by /v1/chat/completions")
    parser.add_argument("--profile")
    asked = parser.parse_args()
    with open(os.devnull, "w") as nowhere:
        setup_logging("info", Console(file=nowhere))
        asyncio.run(run(asked))


if __name__ == "__main__":
    sys.exit(main())
