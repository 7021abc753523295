"""Details of /openapi.json that the types of the request classes lack: forms of messages, prompts and tools, ranges of
sampling parameters. Requests are not validated by these.
"""

from __future__ import annotations

from typing import Any

from proa.server.responses_schema import ResponsesRequest
from proa.server.schema import ApiRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from proa.types import SAMPLING_RANGES

_TEXT: dict[str, Any] = {"type": "string"}
_SOME_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _parts(kind: str) -> dict[str, Any]:
    """Return the schema of a string, or of a list of text parts of type `kind`."""
    part = _object({"type": {"const": kind}, "text": _TEXT})
    return {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": part}]}


_CALLED = _object({"name": _NAME, "arguments": {"const": "{}"}})
_CALL = _object({"id": _SOME_TEXT, "type": {"const": "function"}, "function": _CALLED})
_MESSAGE = {
    "oneOf": [
        _object({"role": {"enum": ["system", "developer", "user"]}, "content": _parts("text")}),
        _object({"role": {"const": "assistant"}, "content": _parts("text")}, reasoning_content=_TEXT),
        _object({"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1, "items": _CALL}}),
        _object({"role": {"const": "tool"}, "tool_call_id": _SOME_TEXT, "content": _parts("text")}),
    ]
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_FUNCTION = _object({"name": _NAME}, description=_TEXT, parameters={"type": "object", "additionalProperties": False})
_TOOLS = {"type": ["array", "null"], "items": _object({"type": {"const": "function"}, "function": _FUNCTION})}
_ITEM = _object({"role": {"enum": ["system", "developer", "user"]}, "content": _parts("input_text")})
_INPUT = {"anyOf": [_SOME_TEXT, {"type": "array", "minItems": 1, "items": _ITEM}]}
_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,20}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_PROMPT = {"anyOf": [_SOME_TEXT, {"type": "array", "minItems": 1, "items": _SOME_TEXT}, _TOKEN_IDS]}

_OF_CLASS: dict[type[ApiRequest], dict[str, Any]] = {
    ChatRequest: {"messages": _MESSAGES, "tools": _TOOLS, "logit_bias": _BIAS},
    CompletionRequest: {"prompt": _PROMPT, "logit_bias": _BIAS},
    TokenizeRequest: {"messages": {**_MESSAGES, "type": ["array", "null"]}, "tools": _TOOLS},
    DetokenizeRequest: {"tokens": _TOKEN_IDS},
    ResponsesRequest: {"input": _INPUT},
}


def refine(schema: type[ApiRequest], properties: dict[str, Any]) -> None:
    """Replace the schemas of fields whose form is known in more detail, and add ranges to sampling parameters."""
    properties.update(_OF_CLASS.get(schema, {}))
    for name, low, high in SAMPLING_RANGES:
        for form in _numbers(properties.get(name, {})):
            form.update(minimum=low, maximum=high)


def _numbers(form: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the numeric alternatives of a field's schema."""
    return [each for each in form.get("anyOf", [form]) if each.get("type") in ("integer", "number")]
