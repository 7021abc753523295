"""How long does the host need between a layer's routing and the device's going on by it? One layer's part of a pass
that is divided by its routing, on a simulated GPU, with tiny experts but as many as a real layer has.

    python benchmarks/probes/routed_section.py --tokens 128 512
    python benchmarks/probes/routed_section.py --tokens 512 --profile

Medians over layers and prompts, host time in us, from the choice's arrival in pinned memory: decided_us: until the
layer's table has been sent; queued_us: until the copies of the tail have been queued, behind the push of the CPU's
pairs; "least": of all layers. What only a GPU has (launches, the driver, the wake-up of the host's thread) is not in
them, and queued_us has the wake-up of the thread that copies in a GPU's place.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from statistics import median
from typing import Any

from routed_prompts import loaded, random_prompts, times_of

from proa.bench.hybrid_shapes import ModelShape
from proa.hybrid.streaming import Streaming
from proa.machine.cost.prefill import CpuExpertCost, GpuCost, PrefillRates

MANY = ModelShape(
    name="many", hidden=128, layers=6, heads=4, kv_heads=2, head_dim=32, experts=128, top_k=8, width=64, vocab=512
)

# An H100's, as if experts had 9.4 MB: by what a simulated GPU takes itself, the head of copies would be the whole layer.
RATES = PrefillRates(1e9, CpuExpertCost(13e-6, 0.46e-6), {10: GpuCost(3e-4, 1e-4)})


class Watched:
    """Uploads with the time of each call."""

    def __init__(self, of: Any) -> None:
        self._of, self.events = of, list[tuple[str, float]]()

    def note(self, what: str) -> None:
        self.events.append((what, time.perf_counter()))

    def start(self, *arguments: Any) -> Any:
        found = self._of.start(*arguments)
        self.note("start")
        return found

    def mark(self) -> Any:
        found = self._of.mark()
        self.note("mark")
        return found

    def fetch(self, *arguments: Any) -> Any:
        fetched, watched = self._of.fetch(*arguments), self

        class Waited:
            def wait(self) -> Any:
                found = fetched.wait()
                watched.note("wait")
                return found

        return Waited()

    def close(self) -> None:
        self._of.close()


def sections(events: list[tuple[str, float]]) -> list[tuple[float, float]]:
    """Seconds from each choice's arrival until its table was sent, and until its copies were queued."""
    found = []
    for at, (what, began_s) in enumerate(events):
        after = events[at + 1 :]
        if what == "wait":
            (_, mark_s), (then, then_s) = after[:2]
            if then == "start":  # else no copy was left to decide
                found.append((mark_s - began_s, then_s - began_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--router", default="zipf")
    parser.add_argument("--profile", action="store_true", help="print where the time of `route` goes")
    asked = parser.parse_args()
    asked.tiny, asked.format, asked.gpu, asked.decode, asked.tiny_shape = True, "bf16", "sim:128MiB,pcie=1GB/s", 8, MANY
    engine, hybrid, streaming = loaded(asked, asked.router, 0)
    streaming.probed_layers = len(hybrid.layers) + 1
    watched: Any = Watched(streaming._uploads)
    streaming._uploads = watched
    profile = cProfile.Profile() if asked.profile else None
    if profile is not None:
        profiled(streaming, profile)
    for tokens in asked.tokens:
        for number, prompt in enumerate(random_prompts(MANY.vocab, asked.prompts + 2, tokens)):
            if number == 2:
                watched.events.clear()
            streaming.rates = RATES
            times_of(engine, prompt, f"{tokens} {number}")
        found = sections(watched.events)
        if not found:
            raise SystemExit("no layer had copies left that the routing decided")
        decided, queued = (sorted(1e6 * each for each in of) for of in zip(*found, strict=True))
        print(json.dumps({
            "tokens": tokens, "layers": len(found), "decided_us": round(median(decided), 1),
            "decided_least_us": round(decided[0], 1), "queued_us": round(median(queued), 1),
            "queued_least_us": round(queued[0], 1),
        }), flush=True)  # fmt: skip
    if profile is not None:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(40)
    hybrid.close()


def profiled(streaming: Streaming, profile: cProfile.Profile) -> None:
    route, join = streaming.route, streaming.join

    def of(function: Any) -> Any:
        def called(*arguments: Any) -> None:
            profile.enable()
            function(*arguments)
            profile.disable()

        return called

    streaming.route, streaming.join = of(route), of(join)  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
