"""Output items of /v1/responses, each with the events between its beginning and its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from proa.server.responses_prompt import DeclaredTool, seal

Events = Iterator[dict[str, Any]]


class Item(Protocol):
    """One output item. The writer adds numbers, item_id and output_index to its events."""

    id: str

    def begin(self) -> Events: ...

    def add(self, text: str) -> Events:
        """Add a piece of its text, reasoning or arguments."""

    def end(self) -> Events: ...

    def content(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the item as far as it is written."""


class MessageItem:
    """A message of one text part."""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._text: list[str] = []

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self._text), "annotations": [], "logprobs": []}

    def begin(self) -> Events:
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str) -> Events:
        self._text.append(text)
        yield {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": []}

    def end(self) -> Events:
        text = "".join(self._text)
        yield {"type": "response.output_text.done", "content_index": 0, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}

    def content(self, status: str = "in_progress") -> dict[str, Any]:
        parts = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}


class ReasoningItem:
    """Reasoning, as text; is_sealed: also as encrypted_content, which clients that store nothing send back."""

    def __init__(self, item_id: str, is_sealed: bool) -> None:
        self.id = item_id
        self._is_sealed = is_sealed
        self._text: list[str] = []

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._text)}

    def begin(self) -> Events:
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str) -> Events:
        self._text.append(text)
        yield {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def end(self) -> Events:
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": "".join(self._text)}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}

    def content(self, status: str = "in_progress") -> dict[str, Any]:
        is_done = status != "in_progress"
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "summary": [], "status": status}
        item["content"] = [self._part()] if is_done else []
        if self._is_sealed:
            item["encrypted_content"] = seal("".join(self._text)) if is_done else ""
        return item


class CallItem:
    """A call of a function or of a custom tool. The input of a custom tool is the argument `input`: it is known only
    when the arguments are complete."""

    def __init__(self, item_id: str, call_id: str, tool: DeclaredTool) -> None:
        self.id = item_id
        self._call_id = call_id
        self._tool = tool
        self._arguments: list[str] = []

    def begin(self) -> Events:
        yield from ()

    def add(self, text: str) -> Events:
        self._arguments.append(text)
        if not self._tool.is_custom:
            yield {"type": "response.function_call_arguments.delta", "delta": text}

    def end(self) -> Events:
        if self._tool.is_custom:
            yield {"type": "response.custom_tool_call_input.delta", "delta": self._input()}
            yield {"type": "response.custom_tool_call_input.done", "input": self._input()}
        else:
            arguments = "".join(self._arguments)
            name = self._tool.name
            yield {"type": "response.function_call_arguments.done", "arguments": arguments, "name": name}

    def _input(self) -> str:
        """Return a custom tool's text; arguments of another form are passed on as they are."""
        text = "".join(self._arguments)
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
        return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else text

    def content(self, status: str = "in_progress") -> dict[str, Any]:
        is_done = status != "in_progress"
        kind = "custom_tool_call" if self._tool.is_custom else "function_call"
        item = {"id": self.id, "type": kind, "status": status, "call_id": self._call_id, "name": self._tool.name}
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        if self._tool.is_custom:
            return {**item, "input": self._input() if is_done else ""}
        return {**item, "arguments": "".join(self._arguments)}
