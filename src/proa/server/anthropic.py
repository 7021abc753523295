"""POST /v1/messages: build the generation job, write Anthropic's stream events, fold them into one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from proa.llm import AsyncLLM
from proa.parsers.events import Parsed, Text
from proa.server import replies
from proa.server.answer import Job
from proa.server.anthropic_replies import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Ending,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    StreamEvent,
    TextBlock,
    TextDelta,
    Usage,
)
from proa.server.anthropic_schema import CountTokensRequest, MessagesRequest
from proa.server.prompts import tokenize_chat
from proa.types import Chat, Chunk, SamplingParams


async def messages_job(llm: AsyncLLM, request: MessagesRequest, answer_id: str, model_name: str) -> Job:
    """Validate and tokenise a request. Raises RequestError, ContextLengthExceeded or ApiError."""
    params = SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(request.stop_sequences),
    )
    prompt = await tokenize_chat(llm, as_chat(request))
    llm.check(prompt, params)
    return Job(
        prompts=[prompt],
        params=params,
        priority=0,
        salt="",
        continuous_usage=False,
        ends_with_usage=True,
        writer=MessagesReplyWriter(answer_id, model_name),
    )


def as_chat(request: CountTokensRequest) -> Chat:
    """Convert to the chat template's form: the system prompt comes first, adjacent messages of one role are merged
    (as Anthropic does), and a final assistant message is continued."""
    turns = [("system", block.text) for block in request.system]
    turns += [(turn.role, block.text) for turn in request.messages for block in turn.content]
    by_role = groupby(turns, key=itemgetter(0))
    messages = [{"role": role, "content": _content([text for _, text in same])} for role, same in by_role]
    continues = messages[-1]["role"] == "assistant"
    return Chat(messages=messages, add_generation_prompt=not continues, continue_final_message=continues)


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    """Return one text block as a string: some templates render a list of parts differently."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


class MessagesReplyWriter:
    """Writes Anthropic's events: one text block, opened by the first chunk and closed by the last."""

    def __init__(self, answer_id: str, model_name: str) -> None:
        self._id = f"msg_{answer_id}"
        self._model = model_name
        self._is_open = False
        self._ending = Ending("end_turn")

    def objects(
        self, prompt_index: int, chunk: Chunk, parsed: Parsed, usage: replies.Usage | None
    ) -> Iterator[StreamEvent]:
        if not self._is_open:
            self._is_open = True
            counted = _usage(len(chunk.prompt_tokens or ()), chunk.cached_tokens or 0, 0)
            yield MessageStart(Message(self._id, self._model, counted))
            yield ContentBlockStart(TextBlock())
        for event in parsed.events:
            if isinstance(event, Text):
                yield ContentBlockDelta(TextDelta(event.text))
        if chunk.finish is not None:
            self._ending = _ending(chunk)
            yield ContentBlockStop()

    def last_objects(self, usage: replies.Usage) -> Iterator[StreamEvent]:
        cached = usage.prompt_tokens_details.cached_tokens
        yield MessageDelta(self._ending, _usage(usage.prompt_tokens, cached, usage.completion_tokens))
        yield MessageStop()

    def fold(self, objects: Sequence[StreamEvent]) -> Message:
        text = "".join(made.delta.text for made in objects if isinstance(made, ContentBlockDelta))
        answer = Message(self._id, self._model, Usage(), content=[TextBlock(text)])
        for made in objects:
            if isinstance(made, MessageDelta):
                answer.usage = made.usage
                answer.stop_reason, answer.stop_sequence = made.delta.stop_reason, made.delta.stop_sequence
        return answer


def _usage(prompt: int, cached: int, output: int) -> Usage:
    return Usage(input_tokens=prompt - cached, cache_read_input_tokens=cached, output_tokens=output)


def _ending(chunk: Chunk) -> Ending:
    if chunk.finish == "length":
        return Ending("max_tokens")
    if isinstance(chunk.stop_reason, str):
        return Ending("stop_sequence", chunk.stop_reason)
    return Ending("end_turn")
