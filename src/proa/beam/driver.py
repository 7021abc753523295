"""Runs a beam search on an engine: one request for one token per live beam and step.

The engine's prefix cache holds the full pages of the prompt and of the beams, so a step computes at most a page of
tokens per beam again (more for models with recurrent states, which continue from copies).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from proa.beam.search import Beam, BeamRules, BeamSearch, Candidates
from proa.engine.processes.handle import EngineHandle
from proa.errors import EngineDead, QueueFull
from proa.text.merge import all_results
from proa.types import EngineRequest, Sampling, SamplingParams, TokenEvent

QUEUE_RETRY_S = 0.05


@dataclass(frozen=True)
class Found:
    """One answer of a search as a single event, and its score; None if the engine could not complete the search."""

    event: TokenEvent
    score: float | None


async def beam_search(engine: EngineHandle, request: EngineRequest, params: SamplingParams) -> list[Found]:
    """Return the n best answers to the prompt of `request`, best first; fewer if there are no more.

    request: a template with the settled end tokens and limits of the answers, `candidates` many logprobs per step. If
    the engine ends a beam with "abort" or "error", all n answers end so. Cancelling aborts the beams' requests.

    Raises what EngineHandle.generate raises; QueueFull only before the first token: later a beam waits for its place.
    """
    settled = request.sampling
    ends = frozenset(settled.eos_token_ids + settled.stop_token_ids)
    rules = BeamRules(
        width=params.sequences,
        max_tokens=settled.max_tokens,
        ends=ends,
        min_tokens=settled.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        top=settled.logprobs,
    )
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=max(rules.candidates, settled.logprobs or 0))
    search, step = BeamSearch(rules), 0
    of_prompt: TokenEvent | None = None  # the first event, which has the facts about the prompt
    while search.live:
        requests = [_request(request, sampling, step, i, beam) for i, beam in enumerate(search.live)]
        events = await all_results(_token(engine, each, waits=step > 0) for each in requests)
        cut_off = next((event for event in events if event.finish in ("abort", "error")), None)
        if cut_off is not None:
            return [Found(TokenEvent(id=request.id, finish=cut_off.finish, error=cut_off.error), None)] * params.n
        of_prompt = of_prompt or events[0]
        search.advance([_candidates(event) for event in events])
        step += 1
    return [Found(_event(request, beam, of_prompt), rules.score(beam)) for beam in search.finished[: params.n]]


def _request(source: EngineRequest, sampling: Sampling, step: int, index: int, beam: Beam) -> EngineRequest:
    """Build the request for the next token of a beam. It has no group: siblings of a group wait for its first request
    to compute the pages of their common prompt, which are cached already."""
    return msgspec.structs.replace(
        source, id=f"{source.id}-{step}-{index}", tokens=[*source.tokens, *beam.tokens], sampling=sampling, group=""
    )


async def _token(engine: EngineHandle, request: EngineRequest, *, waits: bool) -> TokenEvent:
    """Return the event with the token and its logprobs, or the one that ended the request without a token. waits: try
    again while the queue is full."""
    while True:
        try:
            return await _ask(engine, request)
        except QueueFull:
            if not waits:
                raise
        await asyncio.sleep(QUEUE_RETRY_S)


async def _ask(engine: EngineHandle, request: EngineRequest) -> TokenEvent:
    found = None
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if event.logprobs or event.finish in ("abort", "error"):
                found = event
    if found is None:
        raise EngineDead("The engine ended a beam without a token.", "This is a bug in Proa: please report it.")
    return found


def _candidates(event: TokenEvent) -> Candidates:
    return event.logprobs[0].top if event.logprobs else []


def _event(request: EngineRequest, beam: Beam, of_prompt: TokenEvent | None) -> TokenEvent:
    return TokenEvent(
        id=request.id,
        tokens=list(beam.tokens),
        logprobs=None if request.sampling.logprobs is None else list(beam.logprobs),
        cached_tokens=None if of_prompt is None else of_prompt.cached_tokens,
        prompt_experts=None if of_prompt is None else of_prompt.prompt_experts,
        finish="length" if beam.end is None else "stop",
        stop_token=beam.end,
    )
