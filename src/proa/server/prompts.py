"""Validate messages for the chat template, and tokenise prompts without blocking the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from proa.errors import ContextLengthExceeded, RequestError
from proa.llm import AsyncLLM
from proa.parsers.forced import text_or_call
from proa.server.errors import ApiError
from proa.text.tokenizer import Tokenizer
from proa.types import Chat, SamplingParams, Tag

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOLS_HEADER = "x-proa-tools"
MESSAGES_HEADER = "x-proa-messages"
_INLINE_CHARACTERS = 8192  # up to this length, tokenising takes less time than handing it to a thread


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validate messages for the chat template. Unknown keys of messages and tool calls are passed on unchanged.

    The role "developer" becomes "system", the name that templates use; the older role "function" and the field
    "function_call" become a tool's result and a tool call. Raises ApiError 400.
    """
    messages = [_from_function(message, i) for i, message in enumerate(messages)]
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _from_function(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Rewrite a message of the older form of tool calls, in which a result belongs to the call just before it."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": f"call_{number - 1}"}
    if not isinstance(message.get("function_call"), dict):
        return message
    kept = {key: value for key, value in message.items() if key != "function_call"}
    call = {"id": f"call_{number}", "type": "function", "function": message["function_call"]}
    return {**kept, "tool_calls": [call]}


def _read_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise _invalid(f"{path}.role", f"The role is {role!r}; use {', '.join(ROLES[:-1])} or {ROLES[-1]}.")
    if calls is not None:
        _check_tool_calls(calls, f"{path}.tool_calls")
    if content is None and not calls:
        raise _invalid(f"{path}.content", f"The {role} message has no content; add a string or a list of parts.")
    if isinstance(content, list):
        content = [_read_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise _invalid(f"{path}.content", "content must be a string or a list of parts.")
    role = "system" if role == "developer" else role
    return {**message, "role": role, "content": "" if content is None else content}  # None would render as "None"


def _read_part(part: Any, path: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _invalid(path, 'A content part must have the form {"type": "text", "text": "..."}.')
    if kind not in ("text", "refusal"):
        message = f"Content parts of type {kind!r} are not supported; send parts of type 'text'."
        raise ApiError(400, "unsupported_content", message, param=path)
    if not isinstance(part.get(kind), str):
        raise _invalid(path, f"A content part of type {kind!r} needs a string under the key {kind!r}.")
    return {"type": "text", "text": part[kind]}


def _check_tool_calls(calls: Any, path: str) -> None:
    is_list = isinstance(calls, list)
    if not is_list or not all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls):
        raise _invalid(path, 'tool_calls must be a list of {"type": "function", "function": {...}}.')
    for i, call in enumerate(calls):
        called = call["function"]
        if not isinstance(called.get("name"), str):
            raise _invalid(f"{path}[{i}].function.name", "The call needs the function's name, a string.")
        if not isinstance(called.get("arguments"), str | dict | None):
            message = "The arguments of a call must be a string of JSON or an object."
            raise _invalid(f"{path}[{i}].function.arguments", message)


@dataclass(frozen=True)
class Prompt:
    """A conversation's tokens, and response headers that say how it was rewritten for the chat template."""

    tokens: list[int]
    headers: dict[str, str]


async def prompt_of(llm: AsyncLLM, chat: Chat) -> Prompt:
    """Render and tokenise a conversation. Raises RequestError, ContextLengthExceeded, ApiError 400."""
    try:
        if len(str(chat.messages)) + len(str(chat.tools)) <= _INLINE_CHARACTERS:
            rendered = llm.render(chat)
        else:
            rendered = await asyncio.to_thread(llm.render, chat)
    except RecursionError as error:
        raise _invalid("messages", "The request is nested too deeply.") from error
    headers = {TOOLS_HEADER: "system-message"} if rendered.has_system_tools else {}
    if rendered.is_merged:
        headers[MESSAGES_HEADER] = "merged"
    return Prompt(await encode_text(llm, rendered.text, "messages", add_special_tokens=False), headers)


async def encode_text(llm: AsyncLLM, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokenise a text; a long one in a thread, so that the event loop keeps serving other streams.

    Raises RequestError; ContextLengthExceeded, before tokenising, if the text is longer than context_tokens times the
    longest token in bytes.
    """
    if len(text) <= _INLINE_CHARACTERS:
        return llm.tokenizer.encode(text, add_special_tokens)
    await asyncio.to_thread(_refuse_hopeless, llm, text, param)
    return await asyncio.to_thread(llm.tokenizer.encode, text, add_special_tokens)


def _refuse_hopeless(llm: AsyncLLM, text: str, param: str) -> None:
    size_bytes, longest_bytes = len(text.encode("utf-8", "replace")), _longest_token_bytes(llm.tokenizer)
    if size_bytes > llm.context_tokens * longest_bytes:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {llm.context_tokens} tokens of at most {longest_bytes} bytes. "
            f"The text has {size_bytes} bytes.",
            "Shorten the text.",
            param=param,
        )


@lru_cache(maxsize=1)  # decodes the whole vocabulary: a fraction of a second
def _longest_token_bytes(tokenizer: Tokenizer) -> int:
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def with_reasoning(
    llm: AsyncLLM, chat: Chat, prompt: list[int], params: SamplingParams, budget: int | None = None
) -> SamplingParams:
    """Return the parameters with the budget of reasoning; a constraint then applies to the text after the reasoning,
    and includes the marker (text_opening) that the model writes before visible text. Beside tools, which are not
    forced, the answer may be a call instead."""
    constraint = params.constraint
    if budget is None and constraint is None:
        return params
    thinking, opening = llm.thinking(chat, prompt, budget), llm.answers.format.text_opening
    in_text = bool(opening) and thinking is None  # behind the marker
    if constraint is not None and constraint.kind != "tags" and not in_text and (opening or chat.tools):
        constraint = text_or_call(llm.answers.format.calls, chat.tools or (), Tag(opening, constraint))
    return msgspec.structs.replace(params, constraint=constraint, thinking=thinking)


def fitted(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> SamplingParams:
    """Check a request as the engine will; return its parameters, with max_tokens cut to what the context leaves.

    Raises RequestError; ContextLengthExceeded if the prompt leaves no room for a token.
    """
    room = llm.context_tokens - len(prompt)
    if params.max_tokens is not None and 0 < room < params.max_tokens:
        params = msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    llm.check(prompt, params)
    return params


def refuse_too_many(llm: AsyncLLM, answers: int, param: str) -> None:
    """Raise RequestError if one request asks for more sequences than the engine can run and queue together: an empty
    queue would refuse it too."""
    most = llm.plan.max_running + llm.plan.max_queued
    if answers > most:
        raise RequestError(
            f"This request asks for {answers} answers (prompts times n), but the server holds at most {most} at once "
            f"({llm.plan.max_running} running, {llm.plan.max_queued} waiting).",
            "Send fewer prompts or a smaller n per request.",
            param=param,
        )


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)
