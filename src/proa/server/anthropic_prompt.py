"""Conversations of Anthropic's requests in the chat template's form, which is OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from proa.server.anthropic_blocks import ThinkingBlock, ToolResultBlock, ToolUseBlock
from proa.server.anthropic_schema import CountTokensRequest, Thinking, Tool, ToolChoice
from proa.server.tools import Offer, offer_tools
from proa.types import Chat

_NO_TEXT = ("thinking", "redacted_thinking", "tool_use", "tool_result")


def as_chat(request: CountTokensRequest) -> Chat:
    """Convert to the chat template's form: the system prompt comes first, adjacent messages of one role are merged
    (as Anthropic does), and a final assistant message is continued. Raises ApiError 400."""
    turns: list[tuple[str, Any]] = [("system", block) for block in request.system]
    turns += [(turn.role, block) for turn in request.messages for block in turn.content]
    names = {block.id: block.name for _, block in turns if isinstance(block, ToolUseBlock)}
    messages: list[dict[str, Any]] = []
    for role, same in groupby(turns, key=itemgetter(0)):
        blocks = [block for _, block in same]
        messages += [_assistant(blocks)] if role == "assistant" else _others(role, blocks, names)
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return Chat(
        messages=messages,
        tools=offered(request).tools,
        template_kwargs=_switches(request.thinking),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    """Build one message of reasoning, text and calls, in the order in which templates write them."""
    message: dict[str, Any] = {"role": "assistant", "content": _content([b.text for b in blocks if _is_text(b)])}
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    return {**message, "tool_calls": calls} if calls else message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _others(role: str, blocks: Sequence[Any], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user or system turn: each tool result is a message of its own. names: of tools, by the
    id of their call."""
    for is_result, same in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            for block in same:
                named = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
                yield {"role": "tool", "tool_call_id": block.tool_use_id, **named, "content": block.text}
        else:
            yield {"role": role, "content": _content([block.text for block in same if _is_text(block)])}


def _is_text(block: Any) -> bool:
    return block.type not in _NO_TEXT


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    """Return at most one text block as a string: some templates render a list of parts differently."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def offered(request: CountTokensRequest) -> Offer:
    """Return the client's tools, and which are forced; Anthropic's own, which its servers run, are left out. Raises
    ApiError 400."""
    tools = [{"type": "function", "function": _function(tool)} for tool in request.tools if tool.is_custom]
    return offer_tools(tools, _choice(request.tool_choice))


def _function(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {**function, "strict": True} if tool.strict else function


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    return "required" if choice.type == "any" else {"type": "function", "function": {"name": choice.name}}


def _switches(thinking: Thinking | None) -> dict[str, Any]:
    """Return the variables by which chat templates switch reasoning on or off; adaptive: the template's default."""
    if thinking is None or thinking.type == "adaptive":
        return {}
    return dict.fromkeys(("enable_thinking", "thinking"), thinking.type == "enabled")
