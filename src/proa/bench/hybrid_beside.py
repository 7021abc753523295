"""A prompt that comes while others decode: what it waits for its first token, and what they wait meanwhile. Never:
options, tables."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from proa.engine.processes.handle import EngineHandle
from proa.errors import ProaError
from proa.types import EngineRequest, Sampling

MOST_TOKENS = 4096  # of each that decodes, from its first to the prompt's
BEFORE_TOKENS = 24  # of each, before the prompt comes
_SETTLING_TOKENS = 8  # of these, which are not counted


@dataclass(frozen=True)
class Beside:
    """Seconds: when the prompt was sent, when its first token came, and when tokens of each other request came."""

    sent_s: float
    answered_s: float
    others: Sequence[Sequence[float]]


async def ask_beside(engine: EngineHandle, prompts: Sequence[list[int]], late: list[int], run: str) -> Beside:
    """`late` comes when all `prompts` have BEFORE_TOKENS of their answers, which end with its first token. run: a name
    of its own, for ids are in use until the engine is done with a step. Raises ProaError where an answer is too short
    for that, and what the engine raises."""
    ready = [asyncio.Event() for _ in prompts]
    requests = [_request(f"{run} {i}", prompt, MOST_TOKENS) for i, prompt in enumerate(prompts)]
    others = [asyncio.create_task(_decode(engine, *one)) for one in zip(requests, ready, strict=True)]
    try:
        await asyncio.gather(*(event.wait() for event in ready))
        for other in others:
            if other.done():
                other.result()  # raises why it ended
        sent_s = time.perf_counter()
        async with aclosing(engine.generate(_request(f"{run} late", late, 1))) as answer:
            first = await anext(answer)
        answered_s = time.perf_counter()
        if not first.tokens:
            raise ProaError(f"The engine made no token of the prompt: {first.error}", "Report this as a bug.")
    finally:
        for other in others:
            other.cancel()
        ended = await asyncio.gather(*others, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return Beside(sent_s, answered_s, [arrivals for arrivals in ended if isinstance(arrivals, list)])


def _request(name: str, prompt: list[int], tokens: int) -> EngineRequest:
    return EngineRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=tokens, temperature=0.0))


async def _decode(engine: EngineHandle, request: EngineRequest, ready: asyncio.Event) -> list[float]:
    """When its tokens came, until this is cancelled."""
    arrivals: list[float] = []
    try:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                arrivals += [time.perf_counter()] * len(event.tokens)
                if len(arrivals) >= BEFORE_TOKENS:
                    ready.set()
    except asyncio.CancelledError:
        return arrivals
    finally:
        ready.set()
    if len(arrivals) < MOST_TOKENS:
        raise ProaError(f"The engine made {len(arrivals)} tokens instead of {MOST_TOKENS}.", "Report this as a bug.")
    raise ProaError(f"{MOST_TOKENS} tokens were not enough to wait for the prompt.", "Use fewer --prompt-tokens.")


def beside_figures(runs: Sequence[Beside], prompt_tokens: int) -> dict[str, float | None]:
    """The run of median time to the prompt's first token. Gaps lie between neighbouring tokens of one request."""
    run = sorted(runs, key=lambda r: r.answered_s - r.sent_s)[len(runs) // 2]
    ttft_s = run.answered_s - run.sent_s
    before = [b - a for of in run.others for a, b in pairwise(t for t in of[_SETTLING_TOKENS:] if t <= run.sent_s)]
    during = [
        min(b, run.answered_s) - a for of in run.others for a, b in pairwise([*of, run.answered_s])
        if b > run.sent_s and a < run.answered_s
    ]  # fmt: skip
    tokens = [sum(run.sent_s < t <= run.answered_s for t in of) for of in run.others]
    return {
        "requests": float(len(run.others)),
        "prompt_tokens": float(prompt_tokens),
        "ttft_s": ttft_s,
        "prompt_tokens_per_s": prompt_tokens / ttft_s,
        "gap_ms_before": 1e3 * median(before),
        "gap_ms_beside": 1e3 * median(during),
        "gap_ms_longest": 1e3 * max(during),
        "tokens_per_s_before": 1 / mean(before),
        "tokens_per_s_beside": mean(tokens) / ttft_s,
    }
