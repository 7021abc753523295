"""POST /v1/messages: build the generation job, write Anthropic's stream events, fold them into one message."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from proa.llm import AsyncLLM
from proa.parsers.events import Event, Parsed, Reasoning, Text, ToolArguments, ToolCall
from proa.server import replies
from proa.server.answer import Job
from proa.server.anthropic_prompt import as_chat, offered
from proa.server.anthropic_replies import (
    AnyBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Ending,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    SignatureDelta,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from proa.server.anthropic_schema import MessagesRequest
from proa.server.prompts import fitted, prompt_of, with_reasoning
from proa.server.tools import with_calls
from proa.types import Chunk, SamplingParams


async def messages_job(llm: AsyncLLM, request: MessagesRequest, answer_id: str, model_name: str) -> Job:
    """Validate and tokenise a request. Raises RequestError, ContextLengthExceeded or ApiError."""
    params = SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        constraint=request.constraint,
        stop=tuple(request.stop_sequences),
    )
    chat = as_chat(request)
    prompt = await prompt_of(llm, chat)
    choice = request.tool_choice
    one_call = choice is not None and choice.disable_parallel_tool_use
    only_one = one_call or (choice is not None and choice.type == "tool")
    params = with_calls(llm, offered(request), params, only_one=only_one)
    params = with_reasoning(llm, chat, prompt.tokens, params, request.thinking_budget)
    return Job(
        prompts=[prompt.tokens],
        params=fitted(llm, prompt.tokens, params),
        parser=partial(llm.answer_parser, chat, prompt.tokens),
        one_call=one_call,
        headers=prompt.headers,
        writer=MessagesReplyWriter(answer_id, model_name),
    )


class MessagesReplyWriter:
    """Writes Anthropic's events: blocks of text, reasoning and tool calls, each opened by its first event and closed
    by the first of another one. An answer without events has one empty text block."""

    def __init__(self, answer_id: str, model_name: str) -> None:
        self._id = f"msg_{answer_id}"
        self._model = model_name
        self._has_begun = False
        self._ending = Ending("end_turn")
        self._index = -1
        self._open: AnyBlock | None = None
        self._reasoning = hashlib.sha256()  # of the open block

    def objects(
        self, prompt_index: int, chunk: Chunk, parsed: Parsed, usage: replies.Usage | None
    ) -> Iterator[StreamEvent]:
        if not self._has_begun:
            self._has_begun = True
            counted = _usage(len(chunk.prompt_tokens or ()), chunk.cached_tokens or 0, 0)
            yield MessageStart(Message(self._id, self._model, counted))
        for event in parsed.events:
            yield from self._written(event)
        if chunk.finish is not None:
            self._ending = _ending(chunk, parsed)
            if self._index < 0:
                yield from self._opened(TextBlock())
            yield from self._closed()

    def _written(self, event: Event) -> Iterator[StreamEvent]:
        match event:
            case Text(text):
                if not isinstance(self._open, TextBlock):
                    yield from self._opened(TextBlock())
                yield ContentBlockDelta(self._index, TextDelta(text))
            case Reasoning(text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._opened(ThinkingBlock())
                    self._reasoning = hashlib.sha256()
                self._reasoning.update(text.encode())
                yield ContentBlockDelta(self._index, ThinkingDelta(text))
            case ToolCall():
                yield from self._opened(ToolUseBlock(event.id, event.name))
            case ToolArguments():
                yield ContentBlockDelta(self._index, InputJsonDelta(event.json))

    def _opened(self, block: AnyBlock) -> Iterator[StreamEvent]:
        yield from self._closed()
        self._open = block
        self._index += 1
        yield ContentBlockStart(self._index, block)

    def _closed(self) -> Iterator[StreamEvent]:
        if isinstance(self._open, ThinkingBlock):
            signature = base64.b64encode(b"proa" + self._reasoning.digest()).decode()
            yield ContentBlockDelta(self._index, SignatureDelta(signature))
        if self._open is not None:
            yield ContentBlockStop(self._index)
        self._open = None

    def last_objects(self, usage: replies.Usage) -> Iterator[StreamEvent]:
        cached = usage.prompt_tokens_details.cached_tokens
        yield MessageDelta(self._ending, _usage(usage.prompt_tokens, cached, usage.completion_tokens))
        yield MessageStop()

    def fold(self, objects: Sequence[StreamEvent]) -> Message:
        answer = Message(self._id, self._model, Usage())
        pieces: dict[int, list[str]] = {}
        for made in objects:
            match made:
                case ContentBlockStart(index, block):
                    answer.content.append(block)
                    pieces[index] = []
                case ContentBlockDelta(index, SignatureDelta(signature)):
                    answer.content[index] = ThinkingBlock(signature=signature)
                case ContentBlockDelta(index, TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text)):
                    pieces[index].append(text)
                case MessageDelta():
                    answer.usage = made.usage
                    answer.stop_reason, answer.stop_sequence = made.delta.stop_reason, made.delta.stop_sequence
        answer.content = [_filled(block, "".join(pieces[i])) for i, block in enumerate(answer.content)]
        return answer


def _filled(block: AnyBlock, text: str) -> AnyBlock:
    """Return the block with its content, which its deltas had."""
    match block:
        case TextBlock():
            return TextBlock(text)
        case ThinkingBlock():
            return ThinkingBlock(text, block.signature)
        case ToolUseBlock():
            return ToolUseBlock(block.id, block.name, msgspec.json.decode(text) if text else {})


def _usage(prompt: int, cached: int, output: int) -> Usage:
    return Usage(input_tokens=prompt - cached, cache_read_input_tokens=cached, output_tokens=output)


def _ending(chunk: Chunk, parsed: Parsed) -> Ending:
    if parsed.finish == "tool_calls":
        return Ending("tool_use")
    if chunk.finish == "length":
        return Ending("max_tokens")
    if isinstance(chunk.stop_reason, str):
        return Ending("stop_sequence", chunk.stop_reason)
    return Ending("end_turn")
