"""Why does the first decode step after a prompt take longer than later ones?

    python benchmarks/probes/first_decode_step.py --layers 24 --gpu 0 --tokens 512 4096 --temperature 1
    python benchmarks/probes/first_decode_step.py --tiny --gpu sim:64MiB,pcie=1GB/s --tokens 100

A Zipf router, --resident percent of the experts in VRAM, an engine in this process. --prompts prompts of each length,
one after the other. A JSON line for each: the first gaps between tokens and the median gap, in ms. Is the first gap of
the first prompt alone long, the engine prepares something; if it is that of each prompt, the prompt leaves something.
Of one more prompt of each length, the first decode step as Python's profiler sees it: the functions in which the host
spends most time; and with a GPU, of the next one, calls of the driver and work on the device by torch's profiler.
--first host|device: instead, such profiles of the engine's very first prompt and of the decode step after it.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from routed_prompts import add_model_options, loaded, shape_of, times_of

from proa.bench.prompts import random_prompts
from proa.engine.engine import Engine

SHOWN, DECODED = 24, 40  # lines of a profile; tokens of an answer


def in_first_step(context: AbstractContextManager[None]) -> Callable[[int], None]:
    """For times_of: enters the context at the first token, leaves it at the second."""

    def told(tokens: int) -> None:
        if tokens == 1:
            context.__enter__()
        elif tokens == 2:
            context.__exit__(None, None, None)

    return told


@contextmanager
def host_profile() -> Iterator[None]:
    profile = cProfile.Profile()
    profile.enable()
    yield
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(SHOWN)
    say({"profile": "host", "lines": [line.strip() for line in text.getvalue().splitlines() if line.strip()][2:]})


@contextmanager
def device_profile() -> Iterator[None]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
        torch.cuda.synchronize()
    events = list(profile.events())
    begin = min(event.time_range.start for event in events)
    for kind, of in (("driver", torch.autograd.DeviceType.CPU), ("device", torch.autograd.DeviceType.CUDA)):
        longest = sorted(
            (event for event in events if event.device_type == of), key=lambda event: -event.time_range.elapsed_us()
        )
        say({
            "profile": kind,
            "name, begin us, us": [
                (event.name[:60], round(event.time_range.start - begin), round(event.time_range.elapsed_us()))
                for event in longest[:SHOWN]
            ],
        })  # fmt: skip


PROFILES = {"host": host_profile, "device": device_profile}


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def profile_first(
    engine: Engine, prompt: list[int], profile: Callable[[], AbstractContextManager[None]], temperature: float
) -> None:
    """Profile an engine's first prompt, and then the decode step after it."""
    with profile():
        pass  # loads the profiler
    of_prompt, of_step = ExitStack(), in_first_step(profile())

    def told(tokens: int) -> None:
        if tokens == 1:
            of_prompt.close()
        of_step(tokens)

    of_prompt.enter_context(profile())
    at_s = times_of(engine, prompt, "first", DECODED, temperature=temperature, told=told)
    later = [round(1e3 * (b - a), 1) for a, b in pairwise(at_s)]
    say({"first_token_ms": round(1e3 * at_s[0], 1), "later": later[:3]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--resident", type=float, default=25, help="percentage of experts in VRAM")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--first", choices=PROFILES)
    asked = parser.parse_args()
    asked.decode = DECODED
    shape = shape_of(asked)
    engine, hybrid, _ = loaded(asked, "zipf", round(shape.experts * asked.resident / 100))
    if asked.first:
        (prompt,) = random_prompts(shape.vocab, 1, asked.tokens[0])
        profile_first(engine, prompt, PROFILES[asked.first], asked.temperature)
        hybrid.close()
        return
    for tokens in asked.tokens:
        prompts = iter(random_prompts(shape.vocab, asked.prompts + 2, tokens, seed=tokens))
        answer = partial(times_of, engine, count=DECODED, temperature=asked.temperature)
        for number in range(asked.prompts):
            at_s = answer(next(prompts), f"{tokens} {number}")
            gaps = [round(1e3 * (b - a), 2) for a, b in pairwise(at_s)]
            say({"tokens": tokens, "prompt": number, "first_token_ms": round(1e3 * at_s[0], 1), "gaps": gaps[:5],
                 "median": median(gaps)})  # fmt: skip
        answer(next(prompts), f"{tokens} host", told=in_first_step(host_profile()))
        if not asked.gpu.startswith("sim:"):
            answer(next(prompts), f"{tokens} device", told=in_first_step(device_profile()))
    hybrid.close()


if __name__ == "__main__":
    main()
