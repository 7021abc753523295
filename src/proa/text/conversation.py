"""Rewrites conversations for chat templates that ignore tools, or that refuse the order of the messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import msgspec

from proa.errors import RequestError
from proa.types import Chat

Message = dict[str, Any]

_TOOLS = """\
# Tools

You may call functions. Each line between the tags defines one, as JSON:
<tools>
{tools}
</tools>

To call a function, write the following, with its name for NAME and a JSON object for ARGUMENTS:
{written}"""


@dataclass(frozen=True)
class SystemTools:
    """For a template that ignores tools. written: a call in the model's form, of NAME with ARGUMENTS. renders_calls:
    the template renders calls and their results, if not tools; else they are written as text."""

    written: str
    renders_calls: bool


@dataclass(frozen=True)
class Rendered:
    """A prompt's text. has_system_tools: its tools stand in a system message; is_merged: messages were merged, moved,
    divided or written as text, because the template refuses them as they are or leaves out calls."""

    text: str
    has_system_tools: bool = False
    is_merged: bool = False


def render(template: Callable[[Chat], str], chat: Chat, tools: SystemTools | None) -> Rendered:
    """Render a conversation. tools: how to give the request's tools to a template that ignores them; None: it does not.

    It is rewritten if the template refuses it, or leaves out system messages. Raises the template's RequestError for
    the original messages, if it refuses the rewritten ones too.
    """
    has_system_tools, messages = tools is not None and bool(chat.tools), chat.messages
    if tools is not None:
        chat = _with_system_tools(chat, tools) if has_system_tools else chat
        chat = chat if tools.renders_calls else _with_calls_as_text(chat, tools.written)
    if has_system_tools:  # calls as text belong to its form of calls
        messages = chat.messages
    system = list(_system_texts(chat.messages))
    refusal: RequestError | None = None
    accepted: Rendered | None = None
    for form in chain([chat], _rewritten(chat)):
        try:
            text = template(form)
        except RequestError as error:
            refusal = refusal or error
            continue
        rendered = Rendered(text, has_system_tools, is_merged=form.messages != messages)
        if all(one in text for one in system):
            return rendered
        accepted = accepted or rendered
    if accepted is None:
        assert refusal is not None  # of the conversation as it is
        raise refusal
    return accepted


def _system_texts(messages: list[Message]) -> Iterator[str]:
    """Yield the texts of system messages, if one is not the first message. Some templates then leave them out without
    an error: all but the first (gpt-oss, MiniMax-M2), or all but the last (DeepSeek-R1)."""
    system = [message.get("content") for message in messages if message.get("role") == "system"]
    if any(message.get("role") == "system" for message in messages[1:]):
        for content in system:
            parts = content if isinstance(content, list) else [content or ""]
            yield from (text for part in parts if (text := _text([part]).strip()))


def _with_system_tools(chat: Chat, tools: SystemTools) -> Chat:
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in chat.tools or [])
    text = _TOOLS.format(tools=listed, written=tools.written)
    messages = _merged([{"role": "system", "content": text}, *chat.messages], ("system",))
    return msgspec.structs.replace(chat, messages=messages, tools=None)


def _with_calls_as_text(chat: Chat, written: str) -> Chat:
    """Write calls and their results, which the template leaves out, as text."""
    messages = _merged([_as_text(message, written) for message in chat.messages], ("tool response",))
    return msgspec.structs.replace(
        chat, messages=[{**m, "role": "user"} if m.get("role") == "tool response" else m for m in messages]
    )


def _as_text(message: Message, written: str) -> Message:
    """Write a message's calls, or a call's result, as the text of an ordinary message."""
    if message.get("role") == "tool":
        text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
        return {"role": "tool response", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [_text(message.get("content")), *(_written(call.get("function", call), written) for call in calls)]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(text for text in texts if text)}


def _written(function: dict[str, Any], written: str) -> str:
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    begin, _, end = written.partition("ARGUMENTS")  # first: a name may contain this word
    return begin.replace("NAME", str(function.get("name"))) + text + end


def _rewritten(chat: Chat) -> Iterator[Chat]:
    """Yield forms of the conversation that a template may accept, the least changed ones first."""
    for tools in (chat.tools, _described(chat.tools)):
        for changed in (chat.messages, *_with_one_system_message(chat.messages)):
            for messages in (changed, _without_preambles(changed), _without_preambles(_with_single_calls(changed))):
                other = msgspec.structs.replace(chat, messages=messages, tools=tools)
                if other != chat:
                    yield other


def _described(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Give functions without a description an empty one, which gpt-oss' template reads."""
    if tools is None:
        return None
    functions = [tool.get("function") for tool in tools]
    return [
        {**tool, "function": {"description": "", **function}} if isinstance(function, dict) else tool
        for tool, function in zip(tools, functions, strict=True)
    ]


def _with_one_system_message(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages with all system messages as one at the beginning and neighbours of one role merged; then the
    same with the system message's text in the first user message."""
    is_system = [m.get("role") == "system" for m in messages]
    system = [m for m, is_one in zip(messages, is_system, strict=True) if is_one]
    others = [m for m, is_one in zip(messages, is_system, strict=True) if not is_one]
    roles = ("system", "user", "assistant")
    merged = _merged([*system, *others], roles)
    yield merged
    if system:
        at = next((i for i, m in enumerate(others) if m.get("role") == "user"), len(others))
        yield _merged([*others[:at], {**merged[0], "role": "user"}, *others[at:]], roles)


def _without_preambles(messages: list[Message]) -> list[Message]:
    """Move the text of messages with reasoning and calls into their reasoning: gpt-oss' template takes only one of
    the two."""
    made = []
    for message in messages:
        reasoning, text = message.get("reasoning_content"), _text(message.get("content"))
        if message.get("tool_calls") and reasoning and text:
            message = {**message, "reasoning_content": f"{reasoning}\n\n{text}", "content": ""}
        made.append(message)
    return made


def _with_single_calls(messages: list[Message]) -> list[Message]:
    """Divide a message with several calls, each before its result: Llama 3's template takes one call a message."""
    made: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.get("role")):
        same = list(group)
        calls = made[-1].get("tool_calls") or [] if made and role == "tool" else []
        if len(calls) < 2:
            made += same
            continue
        first = made.pop()
        ids = [call.get("id") for call in calls]
        same.sort(key=lambda result: ids.index(i) if (i := result.get("tool_call_id")) in ids else len(ids))
        for number, call in enumerate(calls):
            own = first if number == 0 else {"role": "assistant", "content": ""}
            made += [{**own, "tool_calls": [call]}, *same[number : number + 1]]
        made += same[len(calls) :]
    return made


def _merged(messages: list[Message], roles: tuple[str, ...]) -> list[Message]:
    """Merge neighbouring messages of the same role, for each of `roles`."""
    made: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.get("role")):
        same = list(group)
        if role in roles and len(same) > 1:
            made.append(_joined(same))
        else:
            made += same
    return made


def _joined(messages: list[Message]) -> Message:
    whole: Message = {}
    for message in messages:
        whole.update(message)
    whole["content"] = "\n\n".join(text for m in messages if (text := _text(m.get("content"))))
    calls = [call for m in messages for call in m.get("tool_calls") or []]
    return {**whole, "tool_calls": calls} if calls else whole


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)
