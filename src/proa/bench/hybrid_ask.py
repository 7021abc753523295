"""Requests of `proa bench hybrid`, all at once: what came when. Never: arithmetic over it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from proa.bench.hybrid_figures import Moment
from proa.engine.processes.handle import EngineHandle
from proa.errors import ProaError
from proa.types import EngineRequest, Sampling

SETTLING_TOKENS = 3  # what is counted of a prompt's step may show with these


@dataclass(frozen=True)
class Answer:
    """A moment for each token but the first SETTLING_TOKENS."""

    tokens: list[int]
    moments: list[Moment]


async def ask_all(engine: EngineHandle, prompts: Sequence[list[int]], output_tokens: int) -> list[Answer]:
    """Greedy, each with exactly so many tokens. Raises ProaError where there are others."""
    sampling = Sampling(max_tokens=output_tokens, temperature=0.0)
    requests = [EngineRequest(id=f"r{i}", tokens=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(*(_ask(engine, request) for request in requests))


async def _ask(engine: EngineHandle, request: EngineRequest) -> Answer:
    answer = Answer([], [])
    async for event in engine.generate(request):
        # The engine's clock: on a busy machine the news of many steps may arrive together.
        now = Moment(engine.stats.step_seconds, engine.stats)
        answer.moments.extend([now] * len(event.tokens))
        answer.tokens.extend(event.tokens)
    del answer.moments[:SETTLING_TOKENS]
    if len(answer.tokens) != request.sampling.max_tokens:
        made, asked = len(answer.tokens), request.sampling.max_tokens
        raise ProaError(f"The engine made {made} tokens instead of {asked}.", "Report this as a bug.")
    return answer
