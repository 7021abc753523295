"""Run a checked request on the engine and turn its chunks into the protocol's response objects, streamed or folded
into one response. The objects themselves are written by chat.py, completions.py and anthropic.py."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from proa.errors import ShuttingDown
from proa.llm import AsyncLLM
from proa.obs.metrics import Metrics
from proa.parsers.events import AnswerParser, ChoiceParser, Parsed, PlainText
from proa.server.errors import ApiError
from proa.server.replies import PromptProgress, Usage
from proa.server.service import RequestRecord
from proa.text.answer import numerics_error
from proa.text.merge import merge
from proa.types import Chunk, FinishReason, Progress, SamplingParams


class ReplyWriter(Protocol):
    """Writes the response of one request in its endpoint's format; stateful, one instance per request."""

    def objects(self, prompt_index: int, chunk: Chunk, parsed: Parsed, usage: Usage | None) -> Iterator[Any]:
        """Yield zero or more stream objects for one chunk; attach `usage` to each if given. parsed: the chunk's text,
        split into visible text, reasoning and tool calls."""

    def last_objects(self, usage: Usage) -> Iterator[Any]:
        """Yield the final stream objects: the usage, without text."""

    def fold(self, objects: Sequence[Any]) -> Any:
        """Build the non-streamed response from all stream objects, the final ones included."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A validated, tokenised generation request: after this only the engine can still refuse it."""

    prompts: list[list[int]]
    params: SamplingParams
    writer: ReplyWriter
    priority: int = 0
    salt: str = ""
    continuous_usage: bool = False
    ends_with_usage: bool = True
    parser: Callable[[], AnswerParser] = PlainText  # called once per choice
    one_call: bool = False  # an answer ends with its first tool call
    headers: Mapping[str, str] = field(default_factory=dict)  # of the response
    progress_object: Callable[[PromptProgress], Any] | None = None  # called only if the parameters ask for progress
    failure: Callable[[ApiError], Any] | None = None  # the event that ends a failed stream; None: the dialect's
    is_prompt_only: bool = False  # max_tokens 0: the engine generates one token, which is discarded


async def answer_objects(llm: AsyncLLM, job: Job, record: RequestRecord, metrics: Metrics) -> AsyncGenerator[Any, None]:
    """Yield the stream objects of a job, with the usage last if requested. Closing the generator aborts the request.

    Raises RequestError, QueueFull and other engine refusals before the first object; ShuttingDown or NumericsError
    if generation stops before the answer is complete.
    """
    usage = Usage(prompt_tokens=sum(map(len, job.prompts)))
    usage.total_tokens = record.prompt_tokens = usage.prompt_tokens
    clock = _TokenClock(record, metrics)
    unused = [job.parser()]
    markers = unused[0].kept

    def new_parser() -> ChoiceParser:
        return ChoiceParser(unused.pop() if unused else job.parser(), one_call=job.one_call)

    parsers: defaultdict[Any, ChoiceParser] = defaultdict(new_parser)
    ended: set[tuple[int, int]] = set()  # choices that ended with their first tool call
    num_running = len(job.prompts) * job.params.n
    streams = [llm.stream(p, job.params, priority=job.priority, salt=job.salt, markers=markers) for p in job.prompts]
    async with aclosing(merge(streams)) as chunks:
        async for prompt_index, chunk in chunks:
            if (prompt_index, chunk.index) in ended:
                continue
            if chunk.progress is not None:
                if job.progress_object is not None:
                    yield job.progress_object(_prompt_progress(usage, record, chunk.progress))
                continue
            _refuse_cut_off(chunk)
            if job.progress_object is not None and (whole := _whole_prompt(job, chunk)) is not None:
                yield job.progress_object(_prompt_progress(usage, record, whole))
            if job.is_prompt_only:
                chunk = _without_token(chunk)
            clock.tick((prompt_index, chunk.index), len(chunk.tokens))
            parsed = parsers[prompt_index, chunk.index].feed(chunk.text, chunk.markers, chunk.finish, chunk.ends)
            _count(usage, record, chunk, parsed)
            num_running -= parsed.finish is not None
            if parsed.finish is not None and chunk.finish is None:
                chunk = msgspec.structs.replace(chunk, finish="stop")
                ended.add((prompt_index, chunk.index))
            for written in job.writer.objects(prompt_index, chunk, parsed, usage if job.continuous_usage else None):
                yield written
            if ended and not num_running:
                break  # which aborts the sequences
    if job.ends_with_usage:
        for written in job.writer.last_objects(usage):
            yield written


def _whole_prompt(job: Job, chunk: Chunk) -> Progress | None:
    """The progress of the prompt if this chunk is the first after it and the job asks for progress."""
    if not job.params.return_progress or chunk.index != 0 or chunk.cached_tokens is None:
        return None
    return Progress(sum(map(len, job.prompts)), chunk.cached_tokens)


def _prompt_progress(usage: Usage, record: RequestRecord, progress: Progress) -> PromptProgress:
    time_ms = int(1000 * (time.monotonic() - record.started_s))
    return PromptProgress(usage.prompt_tokens, progress.cached, progress.computed, time_ms)


def _count(usage: Usage, record: RequestRecord, chunk: Chunk, parsed: Parsed) -> None:
    usage.completion_tokens_details.reasoning_tokens += parsed.reasoning_tokens
    usage.completion_tokens += len(chunk.tokens)
    usage.total_tokens += len(chunk.tokens)
    if chunk.cached_tokens is not None and chunk.index == 0:  # the n choices share one prompt: count it once
        usage.prompt_tokens_details.cached_tokens += chunk.cached_tokens
        if chunk.prompt_experts is not None:
            record.streamed_tokens += chunk.prompt_experts.streamed
            record.cpu_tokens += chunk.prompt_experts.cpu
    record.completion_tokens = usage.completion_tokens
    record.cached_tokens = usage.prompt_tokens_details.cached_tokens


def usage_field(usage: Usage | None, *, comes_last: bool) -> Usage | UnsetType | None:
    """Return the `usage` of one stream object: a copy, because the counts change before the object is serialised.
    Without `usage` it is null if they come with the last object (`comes_last`), else left out, as with OpenAI."""
    if usage is not None:
        return copy.deepcopy(usage)
    return None if comes_last else UNSET


def _refuse_cut_off(chunk: Chunk) -> None:
    """Raise ShuttingDown or NumericsError for "abort" and "error": a truncated answer must not look complete."""
    if chunk.finish == "abort":
        raise ShuttingDown("The server shut down before this answer was complete.", "Send the request again.")
    if chunk.finish == "error":
        raise numerics_error(chunk.error)


def _without_token(chunk: Chunk) -> Chunk:
    finish: FinishReason | None = None if chunk.finish is None else "length"
    return msgspec.structs.replace(chunk, text="", tokens=[], ends=[], logprobs=None, finish=finish, stop_reason=None)


class _TokenClock:
    """Records time to first token and inter-token times, per choice."""

    def __init__(self, record: RequestRecord, metrics: Metrics) -> None:
        self._record = record
        self._metrics = metrics
        self._last_s: dict[tuple[int, int], float] = {}

    def tick(self, choice: tuple[int, int], tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        if choice in self._last_s:
            self._metrics.inter_token(now - self._last_s[choice], tokens)
        elif self._record.first_token_s is None:
            self._record.first_token_s = now - self._record.started_s
            self._metrics.first_token(self._record.first_token_s)
        self._last_s[choice] = now
