"""Runs the concurrent requests of `proa bench hybrid` and records when each token was generated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from proa.bench.hybrid_figures import Moment
from proa.engine.processes.handle import EngineHandle
from proa.errors import ProaError
from proa.types import EngineRequest, Sampling

SETTLING_TOKENS = 3  # a prompt step's counters may arrive with these first tokens, which are therefore not timed


@dataclass(frozen=True)
class TimedAnswer:
    """The generated tokens, and a Moment per token, except for the first SETTLING_TOKENS."""

    tokens: list[int]
    moments: list[Moment]


async def run_requests(engine: EngineHandle, prompts: Sequence[list[int]], output_tokens: int) -> list[TimedAnswer]:
    """Generate exactly `output_tokens` greedy tokens for each prompt, concurrently. Raises ProaError for another
    number of tokens."""
    requests = [greedy(f"r{i}", prompt, output_tokens) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(*(_ask(engine, request) for request in requests))


def greedy(name: str, prompt: list[int], output_tokens: int) -> EngineRequest:
    return EngineRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=output_tokens, temperature=0.0))


async def _ask(engine: EngineHandle, request: EngineRequest) -> TimedAnswer:
    answer = TimedAnswer([], [])
    async for event in engine.generate(request):
        # Use the engine's clock: on a busy machine, events of several steps may arrive here together.
        now = Moment(engine.stats.seconds.total, engine.stats)
        answer.moments.extend([now] * len(event.tokens))
        answer.tokens.extend(event.tokens)
    del answer.moments[:SETTLING_TOKENS]
    if len(answer.tokens) != request.sampling.max_tokens:
        made, asked = len(answer.tokens), request.sampling.max_tokens
        raise ProaError(f"The engine generated {made} tokens instead of {asked}.", "Report this as a bug.")
    return answer
