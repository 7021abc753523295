"""POST /v1/responses: build the generation job, write the stream's events; the plain answer is the last event's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from proa.llm import AsyncLLM
from proa.parsers.events import Event, Parsed, Reasoning, Text, ToolArguments, ToolCall
from proa.server import replies
from proa.server.answer import Job
from proa.server.errors import ApiError
from proa.server.prompts import fitted, prompt_of, with_reasoning
from proa.server.responses_items import CallItem, Item, MessageItem, ReasoningItem
from proa.server.responses_prompt import DeclaredTool, as_chat, declared_tools, offered
from proa.server.responses_schema import ENCRYPTED_REASONING, ResponsesRequest
from proa.server.stored_responses import Items, StoredResponses
from proa.server.tools import with_calls
from proa.types import Chunk, SamplingParams


async def responses_job(
    stored: StoredResponses, llm: AsyncLLM, request: ResponsesRequest, answer_id: str, model_name: str
) -> Job:
    """Validate and tokenise a request. Raises RequestError, ContextLengthExceeded or ApiError."""
    if request.store:
        stored.refuse_if_off("store")
    earlier = stored.items(request.previous_response_id) if request.previous_response_id else []
    items = [*earlier, *request.input]
    chat = as_chat(request, items)
    params = SamplingParams(
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        constraint=request.constraint,
    )
    prompt = await prompt_of(llm, chat)
    is_named = isinstance(request.tool_choice, dict) and request.tool_choice.get("type") != "allowed_tools"
    only_one = is_named or not request.parallel_tool_calls
    params = with_calls(llm, offered(request), params, only_one=only_one)
    params = with_reasoning(llm, chat, prompt.tokens, params)
    own_id = f"{answer_id}-{secrets.token_hex(8)}"  # clients may send an x-request-id twice, but continue one response
    writer = ResponsesWriter(request, items, stored, own_id, model_name)
    return Job(
        prompts=[prompt.tokens],
        params=fitted(llm, prompt.tokens, params),
        parser=partial(llm.answer_parser, chat, prompt.tokens),
        one_call=not request.parallel_tool_calls,
        headers=prompt.headers,
        writer=writer,
        failure=writer.failure,
    )


class ResponsesWriter:
    """Writes the events of one response: items of reasoning, text and tool calls, each opened by its first event and
    closed by the first of another one."""

    def __init__(
        self, request: ResponsesRequest, items: Items, stored: StoredResponses, answer_id: str, model_name: str
    ) -> None:
        self._request = request
        self._items = items
        self._stored = stored
        self._answer_id = answer_id
        self._response = _response(request, answer_id, model_name)
        self._tools = declared_tools(request.tools)
        self._sequence = 0
        self._output: Items = []
        self._open: Item | None = None

    def objects(
        self, prompt_index: int, chunk: Chunk, parsed: Parsed, usage: replies.Usage | None
    ) -> Iterator[dict[str, Any]]:
        if not self._sequence:
            yield self._event("response.created", response=dict(self._response))
            yield self._event("response.in_progress", response=dict(self._response))
        for event in parsed.events:
            yield from self._written(event)
        if chunk.finish is not None:
            is_cut = chunk.finish == "length"
            yield from self._closed("incomplete" if is_cut else "completed")
            self._response["status"] = "incomplete" if is_cut else "completed"
            if is_cut:
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}

    def _written(self, event: Event) -> Iterator[dict[str, Any]]:
        number = len(self._output)
        match event:
            case Text(text):
                if not isinstance(self._open, MessageItem):
                    yield from self._opened(MessageItem(f"msg_{self._answer_id}_{number}"))
            case Reasoning(text):
                if not isinstance(self._open, ReasoningItem):
                    is_sealed = ENCRYPTED_REASONING in self._request.include
                    yield from self._opened(ReasoningItem(f"rs_{self._answer_id}_{number}", is_sealed))
            case ToolCall(_, call_id, name):
                tool = self._tools.get(name, DeclaredTool(name, None, False))
                yield from self._opened(CallItem(f"fc_{self._answer_id}_{number}", call_id, tool))
                return
            case ToolArguments(_, text):
                pass
        assert self._open is not None
        yield from map(self._placed, self._open.add(text))

    def _opened(self, item: Item) -> Iterator[dict[str, Any]]:
        yield from self._closed("completed")
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._output), item=item.content())
        yield from map(self._placed, item.begin())

    def _closed(self, status: str) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        yield from map(self._placed, self._open.end())
        done = self._open.content(status)
        yield self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._open = None

    def _placed(self, event: dict[str, Any]) -> dict[str, Any]:
        """Number an event of the open item."""
        assert self._open is not None
        return self._event(**event, item_id=self._open.id, output_index=len(self._output))

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:  # noqa: A002 - the name in the protocol
        self._sequence += 1
        return {"type": type, "sequence_number": self._sequence - 1, **fields}

    def last_objects(self, usage: replies.Usage) -> Iterator[dict[str, Any]]:
        self._response.update(output=self._output, usage=_usage(usage), completed_at=time.time())
        if self._request.store is not False:
            self._stored.add(self._response["id"], [*self._items, *self._output])
        yield self._event(f"response.{self._response['status']}", response=self._response)

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event that ends the stream after an error, with the items that were complete before."""
        details = {"code": error.code, "message": error.message}
        self._response.update(status="failed", output=self._output, error=details)
        return self._event("response.failed", response=self._response)

    def fold(self, objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
        whole: dict[str, Any] = objects[-1]["response"]
        return whole


def _response(request: ResponsesRequest, answer_id: str, model_name: str) -> dict[str, Any]:
    """Build the response object before anything was generated."""
    reasoning = request.reasoning
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "model": model_name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(usage: replies.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
