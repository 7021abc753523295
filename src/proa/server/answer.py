"""From a checked request to the stream of the protocol's objects, and the fold that makes a plain answer of it.
Never: HTTP, the objects' shapes (chat.py, completions.py, anthropic.py)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from proa.errors import ShuttingDown
from proa.llm import AsyncLLM
from proa.obs.metrics import Metrics
from proa.server.replies import PromptDetails, Usage
from proa.server.service import Tally
from proa.text.answer import broken_answer
from proa.text.merge import merge
from proa.types import Chunk, FinishReason, SamplingParams


class Shape(Protocol):
    """How one endpoint writes answers. An object per request; it may remember what it has written."""

    def objects(self, prompt_index: int, chunk: Chunk, usage: Usage | None) -> Iterator[Any]:
        """The stream objects for a piece of an answer, maybe none. `usage` is put on each if given."""

    def last_objects(self, usage: Usage) -> Iterator[Any]:
        """The last stream objects: no text, the usage."""

    def fold(self, objects: Sequence[Any]) -> Any:
        """The plain answer, made of everything streamed, the last objects included."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to generate: checked and tokenised, so that from here on only the engine can refuse."""

    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    salt: str
    continuous_usage: bool
    shape: Shape
    ends_with_usage: bool
    is_prompt_only: bool = False  # max_tokens 0: the engine's one token is thrown away


async def answer_objects(llm: AsyncLLM, job: Job, tally: Tally, metrics: Metrics) -> AsyncGenerator[Any, None]:
    """The stream objects of a job, the usage last if wanted. Closing it aborts what still runs.

    Raises the engine's refusal before the first object; ShuttingDown or NumericsError when an answer is cut off.
    """
    usage = Usage(prompt_tokens=sum(map(len, job.prompts)))
    usage.total_tokens = tally.prompt_tokens = usage.prompt_tokens
    clock = _TokenClock(tally, metrics)
    streams = [llm.stream(p, job.params, priority=job.priority, salt=job.salt) for p in job.prompts]
    async with aclosing(merge(streams)) as chunks:
        async for prompt_index, chunk in chunks:
            _refuse_cut_off(chunk)
            if job.is_prompt_only:
                chunk = _without_token(chunk)
            clock.tick((prompt_index, chunk.index), len(chunk.tokens))
            _count(usage, tally, chunk)
            for written in job.shape.objects(prompt_index, chunk, usage if job.continuous_usage else None):
                yield written
    if job.ends_with_usage:
        for written in job.shape.last_objects(usage):
            yield written


def _count(usage: Usage, tally: Tally, chunk: Chunk) -> None:
    usage.completion_tokens += len(chunk.tokens)
    usage.total_tokens += len(chunk.tokens)
    if chunk.cached_tokens is not None and chunk.index == 0:  # the n choices of a prompt share it
        usage.prompt_tokens_details.cached_tokens += chunk.cached_tokens
    tally.completion_tokens = usage.completion_tokens
    tally.cached_tokens = usage.prompt_tokens_details.cached_tokens


def copy_usage(usage: Usage) -> Usage:
    """As it is now: streamed objects are written later, when the counts have moved on."""
    details = PromptDetails(usage.prompt_tokens_details.cached_tokens)
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, details)


def _refuse_cut_off(chunk: Chunk) -> None:
    """An answer that the engine did not bring to its end must not look complete."""
    if chunk.finish == "abort":
        raise ShuttingDown("The server stopped before this answer was complete.", "Ask again.")
    if chunk.finish == "error":
        raise broken_answer(chunk.error)


def _without_token(chunk: Chunk) -> Chunk:
    finish: FinishReason | None = None if chunk.finish is None else "length"
    return msgspec.structs.replace(chunk, text="", tokens=[], logprobs=None, finish=finish, stop_reason=None)


class _TokenClock:
    """Times the tokens of each choice."""

    def __init__(self, tally: Tally, metrics: Metrics) -> None:
        self._tally = tally
        self._metrics = metrics
        self._last_s: dict[tuple[int, int], float] = {}

    def tick(self, choice: tuple[int, int], tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        if choice in self._last_s:
            self._metrics.inter_token(now - self._last_s[choice], tokens)
        elif self._tally.first_token_s is None:
            self._tally.first_token_s = now - self._tally.started_s
            self._metrics.first_token(self._tally.first_token_s)
        self._last_s[choice] = now
