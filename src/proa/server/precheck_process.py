"""The process of Precheck: `python -m proa.server.precheck_process`. It ends when its standard input does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, BinaryIO

import msgspec

from proa.errors import ProaError
from proa.llm import AsyncLLM, TextSource
from proa.obs.units import format_bytes
from proa.server import ollama
from proa.server.anthropic import messages_job
from proa.server.anthropic_schema import MessagesRequest
from proa.server.body import decode
from proa.server.chat import chat_job
from proa.server.completions import completion_job
from proa.server.errors import ApiError, from_proa
from proa.server.intake import validated
from proa.server.ollama_schema import OllamaChatRequest, OllamaGenerateRequest
from proa.server.openapi import POSTED
from proa.server.precheck import SIZE_BYTES, Check, Outcome, Right, Wrong
from proa.server.responses import responses_job
from proa.server.responses_schema import ResponsesRequest
from proa.server.schema import ApiRequest, ChatRequest, CompletionRequest
from proa.server.stored_responses import StoredResponses

MAX_REDUCED_BYTES = 8 << 20  # of the reduced body: a million tokens are 5 MB of text or 7 MB of token ids
_NICENESS = 10  # behind the server and the engine


async def _response_job(llm: AsyncLLM, request: ResponsesRequest, answer_id: str, name: str) -> None:
    if request.previous_response_id is None:  # only the server has stored responses
        await responses_job(StoredResponses(1), llm, request, answer_id, name)


_JOBS: dict[type[ApiRequest], Callable[..., Coroutine[Any, Any, Any]]] = {
    ChatRequest: chat_job,
    CompletionRequest: completion_job,
    MessagesRequest: messages_job,
    ResponsesRequest: _response_job,
    OllamaChatRequest: ollama.chat_job,
    OllamaGenerateRequest: ollama.generate_job,
}
_SCHEMAS = {schema.__name__: schema for schema in POSTED.values()}


def checked(llm: AsyncLLM, check: Check, body: bytes) -> Outcome:
    """Validate and tokenise a request as the server would; return its reduced body, or its error."""
    try:
        return Right(_reduced(llm, check, body))
    except ProaError as error:
        wrong = from_proa(error)
    except ApiError as error:
        wrong = error
    return Wrong(wrong.status, wrong.code, wrong.message, wrong.param, wrong.headers)


def _reduced(llm: AsyncLLM, check: Check, body: bytes) -> bytes:
    schema = _SCHEMAS[check.schema]
    request = validated(decode(body), schema, strict=check.strict)
    if schema in _JOBS:
        asyncio.run(_JOBS[schema](llm, request.asked, "", ""))
    fields = {**request.fields, **dict.fromkeys(request.unknown), **dict.fromkeys(request.ignored, True)}
    left = msgspec.json.encode(fields)
    if len(left) > MAX_REDUCED_BYTES:
        message = f"The fields that are used have {format_bytes(len(left))}; at most {format_bytes(MAX_REDUCED_BYTES)}."
        raise ApiError(413, "body_too_large", message)
    return left


def _read(stream: BinaryIO) -> bytes:
    return stream.read(int.from_bytes(stream.read(SIZE_BYTES), "little"))


def main() -> None:
    os.nice(_NICENESS)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    llm = AsyncLLM.without_engine(msgspec.msgpack.decode(_read(stdin), type=TextSource))
    while message := _read(stdin):
        check = msgspec.msgpack.decode(message, type=Check)
        outcome = msgspec.msgpack.encode(checked(llm, check, stdin.read(check.body_bytes)))
        stdout.write(len(outcome).to_bytes(SIZE_BYTES, "little") + outcome)
        stdout.flush()


if __name__ == "__main__":
    main()
