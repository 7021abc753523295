"""Items and tools of /v1/responses in the chat template's form, which is that of /v1/chat/completions."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proa.server.errors import ApiError
from proa.server.prompts import ROLES, read_messages
from proa.server.responses_schema import ResponsesRequest
from proa.server.tools import Offer, offer_tools
from proa.types import Chat

_SEALED = "proa."  # begins our form of encrypted_content
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_DROPPED = ("web_search_call",)  # history of tools that did not run here
# Types of the fields of a function or custom tool, all optional.
_TOOL_FIELDS: dict[str, type] = {"description": str, "parameters": dict, "format": dict}


@dataclass(frozen=True)
class DeclaredTool:
    """A tool of a request. A custom tool takes a text: the model sees a function with one argument, `input`."""

    name: str
    namespace: str | None
    is_custom: bool


def function_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees."""
    return name if namespace is None else f"{namespace}__{name}"


def declared_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, DeclaredTool]:
    """Return the usable tools by the name that the model sees."""
    return {
        name: DeclaredTool(tool["name"], namespace, tool["type"] == "custom") for name, namespace, tool in _flat(tools)
    }


def as_chat(request: ResponsesRequest, items: Sequence[Mapping[str, Any]]) -> Chat:
    """Convert a request to the template's form; items: of the conversation, earlier responses included. Raises
    ApiError 400."""
    messages = _Messages()
    if request.instructions:
        messages.add({"role": "system", "content": request.instructions})
    for i, item in enumerate(items, start=len(request.input) - len(items)):  # below 0: of earlier responses
        messages.item(item, f"input[{i}]")
    effort = request.reasoning.effort if request.reasoning is not None else None
    variables = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return Chat(messages=read_messages(messages.all), tools=offered(request).tools, template_kwargs=variables)


class _Messages:
    """Collects messages: reasoning, text and calls of one turn become one assistant message, neighbouring system and
    developer messages one system message."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def item(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type") or "message"
        match kind:
            case "message":
                role = item.get("role")
                if role not in ROLES:
                    raise _invalid(f"{path}.role", f"The role is {role!r}; use {', '.join(ROLES[:-1])} or {ROLES[-1]}.")
                self.add({"role": role, "content": _text(item.get("content"), f"{path}.content")})
            case "reasoning":
                self._begin_turn({"reasoning_content": _reasoning(item, path)})
            case "function_call" | "custom_tool_call":
                self._call(item, path)
            case "function_call_output" | "custom_tool_call_output":
                call_id, output = _field(item, "call_id", path), _text(item.get("output"), f"{path}.output")
                self.add({"role": "tool", "tool_call_id": call_id, "content": output})
            case _ if kind not in _DROPPED:
                message = f"Items of type {kind!r} are not supported."
                raise ApiError(400, "unsupported_content", message, param=path)

    def add(self, message: dict[str, Any]) -> None:
        last = self.all[-1] if self.all else {}
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "assistant" and last.get("role") == "assistant" and "tool_calls" not in last:
            last["content"] += message["content"]
        elif message["role"] == "system" and last.get("role") == "system":
            last["content"] += "\n\n" + message["content"]
        else:
            self.all.append(message)

    def _begin_turn(self, fields: dict[str, Any]) -> None:
        self.all.append({"role": "assistant", "content": "", **fields})

    def _call(self, item: Mapping[str, Any], path: str) -> None:
        if not self.all or self.all[-1]["role"] != "assistant":
            self._begin_turn({})
        name = function_name(_field(item, "name", path), item.get("namespace"))
        if item["type"] == "custom_tool_call":
            arguments = msgspec.json.encode({"input": _field(item, "input", path)}).decode()
        else:
            arguments = _field(item, "arguments", path)
        function = {"name": name, "arguments": arguments}
        call = {"id": _field(item, "call_id", path), "type": "function", "function": function}
        self.all[-1].setdefault("tool_calls", []).append(call)


def _field(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{path}.{name}", f"{path}.{name} must be a string.")
    return value


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param=param)


def _text(content: Any, path: str) -> str:
    """Return the text of a string or of a list of text parts. Raises ApiError 400 for pictures, files and sound."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(path, f"{path} must be a string or a list of parts.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(str(part.get("refusal")))
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            message = f"Content parts of type {kind!r} are not supported; send parts of type 'input_text'."
            raise ApiError(400, "unsupported_content", message, param=f"{path}[{i}]")
    return "\n".join(texts)


def seal(reasoning: str) -> str:
    """Encode reasoning as encrypted_content, which clients send back. It is not secret: only packed."""
    return _SEALED + base64.b64encode(zlib.compress(reasoning.encode())).decode()


def _reasoning(item: Mapping[str, Any], path: str) -> str:
    """Return the reasoning of an item: its content, else what `seal` packed; another server's stays unread."""
    if item.get("content"):
        return _text(item["content"], f"{path}.content")
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return ""
    try:
        unpacker = zlib.decompressobj()
        return unpacker.decompress(base64.b64decode(sealed[len(_SEALED) :], validate=True), 1 << 25).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        message = f"encrypted_content of a reasoning item is damaged: {error}."
        raise _invalid(f"{path}.encrypted_content", message) from error


def _objects(value: Any, path: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of objects, empty for null. Raises ApiError 400 for anything else."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise _invalid(path, f"{path} must be a list of objects.")
    return value


def _flat(
    tools: Sequence[Mapping[str, Any]], namespace: str | None = None, path: str = "tools"
) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yield (name that the model sees, namespace, tool) of all functions and custom tools. Raises ApiError 400."""
    for i, tool in enumerate(tools):
        here = f"{path}[{i}]"
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            yield from _flat(_objects(tool.get("tools"), f"{here}.tools"), _field(tool, "name", here), f"{here}.tools")
        elif kind in ("function", "custom"):
            for name, form in _TOOL_FIELDS.items():
                if not isinstance(tool.get(name), form | None):
                    raise _invalid(
                        f"{here}.{name}", f"{here}.{name} must be {'a string' if form is str else 'an object'}."
                    )
            yield function_name(_field(tool, "name", here), namespace), namespace, tool


def offered(request: ResponsesRequest) -> Offer:
    """Return the tools as functions, and which of them are forced. Raises ApiError 400."""
    choice, tools = request.tool_choice, [(name, tool) for name, _, tool in _flat(request.tools)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = _objects(choice.get("tools"), "tool_choice.tools")
        allowed = {name for named in listed if isinstance(name := named.get("name"), str)}
        tools = [(name, tool) for name, tool in tools if allowed & {name, tool["name"]}]
        choice = choice.get("mode", "auto")
    elif isinstance(choice, dict):
        wanted = choice.get("name")
        found = next((name for name, tool in tools if wanted in (name, tool["name"])), wanted)
        choice = {"type": "function", "function": {"name": found}}
    return offer_tools([_function(name, tool) for name, tool in tools], choice)


def _function(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    description, parameters = tool.get("description") or "", tool.get("parameters") or {"type": "object"}
    if tool["type"] == "custom":
        form = tool.get("format") or {}
        if "definition" in form:
            description += f"\n\nThe input follows this {form.get('syntax', '')} grammar:\n{form['definition']}"
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {**function, "strict": True} if tool.get("strict") is True else function}
