"""Ollama's endpoints: chat and generate as lines of JSON, and descriptions of the served model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from proa.llm import AsyncLLM
from proa.parsers.events import Parsed, PlainText, Reasoning, Text, ToolArguments, ToolCall
from proa.server import replies
from proa.server.answer import Job
from proa.server.errors import json_response
from proa.server.intake import ignored_header, read_request
from proa.server.ollama_schema import (
    Message,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
)
from proa.server.prompts import Prompt, encode_text, fitted, prompt_of, read_messages, with_reasoning
from proa.server.service import Service
from proa.server.tools import offer_tools
from proa.types import Chat, Chunk, SamplingParams

API_VERSION = "0.12.0"  # of Ollama's interface: clients refuse servers that are too old


async def chat_job(llm: AsyncLLM, request: OllamaChatRequest, answer_id: str, model_name: str) -> Job:
    """Validate and tokenise a request. Raises RequestError, ContextLengthExceeded or ApiError."""
    messages = read_messages([_message(message) for message in request.messages])
    chat = Chat(messages=messages, tools=offer_tools(request.tools, None).tools, template_kwargs=request.switches)
    return _job(llm, request, await prompt_of(llm, chat), chat, OllamaWriter(model_name, _chat_fields))


async def generate_job(llm: AsyncLLM, request: OllamaGenerateRequest, answer_id: str, model_name: str) -> Job:
    """Validate and tokenise a request: a prompt for the chat template, or with `raw` a text that is continued."""
    writer = OllamaWriter(model_name, _generate_fields)
    if request.raw:
        return _job(llm, request, Prompt(await encode_text(llm, request.prompt, "prompt"), {}), None, writer)
    messages = [{"role": "system", "content": request.system}] if request.system else []
    chat = Chat(messages=[*messages, {"role": "user", "content": request.prompt}], template_kwargs=request.switches)
    return _job(llm, request, await prompt_of(llm, chat), chat, writer)


def _job(llm: AsyncLLM, request: OllamaRequest, prompt: Prompt, chat: Chat | None, writer: OllamaWriter) -> Job:
    options = request.options
    most = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    params = SamplingParams(
        max_tokens=most,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop=tuple(options.stop),
        constraint=request.constraint,
    )
    if chat is not None:
        params = with_reasoning(llm, chat, prompt.tokens, params)
    return Job(
        prompts=[prompt.tokens],
        params=fitted(llm, prompt.tokens, params),
        parser=PlainText if chat is None else partial(llm.answer_parser, chat, prompt.tokens),
        headers=prompt.headers,
        writer=writer,
    )


def _message(message: Message) -> dict[str, Any]:
    """Convert to OpenAI's form. Ollama's calls have no ids."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_name:
        made["name"] = message.tool_name
    if message.tool_calls:
        made["tool_calls"] = [
            {"type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in message.tool_calls
        ]
    return made


Fields = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]  # (text, reasoning, tool calls) -> an answer's part


def _chat_fields(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    return {"message": {**message, "tool_calls": calls} if calls else message}


def _generate_fields(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, **({"thinking": thinking} if thinking else {})}


class OllamaWriter:
    """Writes an object for each chunk with text, and one with counts and times at the end. A call is sent when its
    arguments are complete."""

    def __init__(self, model_name: str, fields: Fields) -> None:
        self._model = model_name
        self._fields = fields
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self._call: tuple[str, list[str]] | None = None  # name and pieces of arguments
        self._written: list[tuple[str, str, list[dict[str, Any]]]] = []
        self._reason = "stop"

    def objects(
        self, prompt_index: int, chunk: Chunk, parsed: Parsed, usage: replies.Usage | None
    ) -> Iterator[dict[str, Any]]:
        if self._first_s is None and chunk.tokens:
            self._first_s = time.monotonic()
        text, thinking = "", ""
        calls: list[dict[str, Any]] = []
        for event in parsed.events:
            match event:
                case Text():
                    text += event.text
                case Reasoning():
                    thinking += event.text
                case ToolCall():
                    calls += self._finished_call()
                    self._call = (event.name, [])
                case ToolArguments():
                    assert self._call is not None  # a call begins before its arguments
                    self._call[1].append(event.json)
        if chunk.finish is not None:
            calls += self._finished_call()
            self._reason = "length" if chunk.finish == "length" else "stop"
        if text or thinking or calls:
            self._written.append((text, thinking, calls))
            yield {**self._head(), **self._fields(text, thinking, calls), "done": False}

    def _finished_call(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        (name, pieces), self._call = self._call, None
        return [{"function": {"name": name, "arguments": msgspec.json.decode("".join(pieces) or "{}")}}]

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": _now()}

    def last_objects(self, usage: replies.Usage) -> Iterator[dict[str, Any]]:
        now_s = time.monotonic()
        first_s = self._first_s or now_s
        yield {
            **self._head(),
            **self._fields("", "", []),
            "done": True,
            "done_reason": self._reason,
            "total_duration": _ns(now_s - self._began_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first_s - self._began_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(now_s - first_s),
        }

    def fold(self, objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
        texts, thoughts, calls = zip(*self._written, strict=True) if self._written else ((), (), ())
        whole = self._fields("".join(texts), "".join(thoughts), [call for some in calls for call in some])
        return {**objects[-1], **whole}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def tags(service: Service) -> Response:
    """Serve /api/tags and /api/ps: the served model."""
    return json_response({"models": [] if service.llm is None else [_card(service, service.llm)]})


def _card(service: Service, llm: AsyncLLM) -> dict[str, Any]:
    plan, created = llm.plan, datetime.fromtimestamp(service.created_s, UTC).isoformat()
    return {
        "name": service.model_name,
        "model": service.model_name,
        "modified_at": created,
        "expires_at": datetime.fromtimestamp(2**32, UTC).isoformat(),
        "size": plan.memory.weights_bytes,
        "size_vram": 0,
        "digest": hashlib.sha256(service.model_name.encode()).hexdigest(),
        "details": _details(llm),
        "context_length": llm.context_tokens,
    }


def _details(llm: AsyncLLM) -> dict[str, Any]:
    kind = llm.plan.load_format
    return {"parent_model": "", "format": kind, "family": "proa", "families": ["proa"], "parameter_size": "",
            "quantization_level": llm.plan.dtype}  # fmt: skip


async def show(request: Request, service: Service) -> Response:
    """Serve /api/show."""
    asked, ignored = await read_request(request, service, OllamaShowRequest)
    service.check_model(asked.name)
    llm = service.loaded()
    model_info = {"general.architecture": "proa", "proa.context_length": llm.context_tokens}
    shown = {"modelfile": "", "parameters": "", "template": "", "details": _details(llm), "model_info": model_info}
    thinks = [] if llm.answers.format.reasoning is None else ["thinking"]
    return json_response({**shown, "capabilities": ["completion", "tools", *thinks]}, headers=ignored_header(ignored))


def version() -> Response:
    return json_response({"version": API_VERSION})


def loaded(service: Service) -> Response:
    """Answer a request without a prompt, which asks only that the model be loaded."""
    service.ready()
    answer = {"model": service.model_name, "created_at": _now(), "done": True, "done_reason": "load"}
    return json_response({**answer, **_chat_fields("", "", []), "response": ""})
