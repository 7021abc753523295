"""Messages and tools as templates expect them, and tokenising off the event loop. Never: templates, sampling."""

from __future__ import annotations

import asyncio
from typing import Any

from proa.llm import AsyncLLM
from proa.server.errors import ApiError
from proa.types import Chat

ROLES = ("system", "developer", "user", "assistant", "tool")
_INLINE_CHARACTERS = 8192  # shorter texts are tokenised at once: a thread would take longer


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages; keys Proa does not know go to the template unchanged, as do parts and tool calls.

    developer becomes system, the name that templates know. Raises ApiError 400.
    """
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise _invalid(f"{path}.role", f"role is {role!r}; use {', '.join(ROLES[:-1])} or {ROLES[-1]}.")
    if calls is not None:
        _check_tool_calls(calls, f"{path}.tool_calls")
    if content is None and not calls:
        raise _invalid(f"{path}.content", f"The {role} message has no content.")
    if isinstance(content, list):
        content = [_read_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise _invalid(f"{path}.content", "content must be a string or a list of parts.")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _read_part(part: Any, path: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _invalid(path, 'A part must look like {"type": "text", "text": "..."}.')
    if kind not in ("text", "refusal"):
        message = f"This model reads text only; a part of type {kind!r} cannot be used."
        raise ApiError(400, "unsupported_content", message, param=path)
    if not isinstance(part.get(kind), str):
        raise _invalid(path, f"A part of type {kind!r} needs a string {kind!r}.")
    return {"type": "text", "text": part[kind]}


def _check_tool_calls(calls: Any, path: str) -> None:
    is_list = isinstance(calls, list)
    if not is_list or not all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls):
        raise _invalid(path, 'tool_calls must be a list of {"type": "function", "function": {...}}.')


def read_tools(tools: list[dict[str, Any]] | None, choice: Any) -> list[dict[str, Any]] | None:
    """The tools for the template: none under tool_choice "none". Raises ApiError 400 for a forced call."""
    for i, tool in enumerate(tools or []):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise _invalid(f"tools[{i}]", 'A tool must look like {"type": "function", "function": {...}}.')
    if choice in (None, "auto"):
        return tools or None
    if choice == "none":
        return None
    message = 'Only the tool_choice "auto" and "none" are implemented: Proa cannot force a call yet.'
    raise ApiError(400, "unsupported_parameter", message, param="tool_choice")


async def tokenize(llm: AsyncLLM, prompt: str | list[int] | Chat) -> list[int]:
    """llm.tokenize; long texts in a thread, so that running streams go on meanwhile."""
    if isinstance(prompt, list) or _length(prompt) <= _INLINE_CHARACTERS:
        return llm.tokenize(prompt)
    return await asyncio.to_thread(llm.tokenize, prompt)


def _length(prompt: str | Chat) -> int:
    return len(prompt) if isinstance(prompt, str) else len(str(prompt.messages)) + len(str(prompt.tools))


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)
