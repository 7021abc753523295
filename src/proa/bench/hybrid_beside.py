"""Measures a prompt that arrives while other requests decode: its time to first token, and their stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from proa.bench.hybrid_ask import greedy
from proa.engine.processes.handle import EngineHandle
from proa.errors import ProaError
from proa.machine.cost.turns import GapLimit
from proa.types import EngineRequest

MOST_TOKENS = 4096  # answer length of each decoding request; it must last until the prompt's first token
BEFORE_TOKENS = 24  # tokens that each request has generated when the prompt is sent
_SETTLING_TOKENS = 8  # the first of them, which are not timed


@dataclass(frozen=True)
class Beside:
    """One run, in seconds of time.perf_counter: when the prompt was sent, when its first token arrived, and when each
    token of each other request arrived."""

    sent_s: float
    answered_s: float
    others: Sequence[Sequence[float]]

    @property
    def ttft_s(self) -> float:
        return self.answered_s - self.sent_s


async def ask_beside(engine: EngineHandle, prompts: Sequence[list[int]], late: list[int], run: str) -> Beside:
    """Start `prompts`; send `late` when each has generated BEFORE_TOKENS; abort them when it has its first token.

    run: makes request ids unique over runs, because an aborted id stays in use until the current step ends. Raises
    ProaError if an answer ends before the late prompt's first token, and what the engine raises.
    """
    ready = [asyncio.Event() for _ in prompts]
    requests = [greedy(f"{run} {i}", prompt, MOST_TOKENS) for i, prompt in enumerate(prompts)]
    others = [asyncio.create_task(_decode(engine, *one)) for one in zip(requests, ready, strict=True)]
    try:
        await asyncio.gather(*(event.wait() for event in ready))
        for other in others:
            if other.done():
                other.result()  # raises its error
        sent_s = time.perf_counter()
        async with aclosing(engine.generate(greedy(f"{run} late", late, 1))) as answer:
            first = await anext(answer)
        answered_s = time.perf_counter()
        if not first.tokens:
            raise ProaError(f"The engine generated no token for the prompt: {first.error}", "Report this as a bug.")
    finally:
        for other in others:
            other.cancel()
        ended = await asyncio.gather(*others, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return Beside(sent_s, answered_s, [arrivals for arrivals in ended if isinstance(arrivals, list)])


async def _decode(engine: EngineHandle, request: EngineRequest, ready: asyncio.Event) -> list[float]:
    """Generate until cancelled; return the arrival times of the tokens. Sets `ready` after BEFORE_TOKENS."""
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
        raise ProaError(
            f"The engine generated {len(arrivals)} tokens instead of {MOST_TOKENS}.", "Report this as a bug."
        )
    raise ProaError(
        f"A decoding request ended, after {MOST_TOKENS} tokens, before the prompt's first token.",
        "Use fewer --prompt-tokens.",
    )


def beside_figures(
    runs: Sequence[Beside], alone: Sequence[Beside], prompt_tokens: int, limit: GapLimit | None
) -> dict[str, float | None]:
    """Compute the figures of the run with the median time to first token. A gap is the time between consecutive tokens
    of one decoding request. alone: runs without decoding requests. limit: the plan's limit of gaps; None: prefill
    shares steps with decode."""
    run = sorted(runs, key=lambda r: r.ttft_s)[len(runs) // 2]
    ttft_s, alone_s = run.ttft_s, median(r.ttft_s for r in alone)
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
        "prompt_tokens_per_s_alone": prompt_tokens / alone_s,
        "speed_share": alone_s / ttft_s,
        "gap_ms_before": 1e3 * median(before),
        "gap_ms_limit": None if limit is None else 1e3 * limit.longest_s(median(before)),
        "gap_ms_beside": 1e3 * median(during),
        "gap_ms_p99": 1e3 * sorted(during)[int(0.99 * len(during))],
        "gap_ms_longest": 1e3 * max(during),
        "tokens_per_s_before": 1 / mean(before),
        "tokens_per_s_beside": mean(tokens) / ttft_s,
    }
