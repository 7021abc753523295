"""Readers of calls whose arguments are JSON: the text between a call's delimiters -> calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from proa.parsers.calls import Call, Incomplete, InString, Malformed, Tools, as_arguments, load_json_object

_DECODER = json.JSONDecoder(strict=False)  # models write newlines into strings
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?P<end>"?)', re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?P<index>:\d+)?", re.DOTALL)
_MISTRAL = re.compile(
    r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\](?P<arguments>.*)", re.DOTALL
)

KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def read_json(body: str, tools: Tools) -> list[Call]:
    """Read objects {"name": ..., "arguments" or "parameters": {...}}: one, a list of them, or several separated by
    whitespace, ";" or ",". Used by Hermes, Qwen2.5, Qwen3, Llama 3 and Nemotron 2."""
    values = [item for value in _values(body) for item in (value if isinstance(value, list) else [value])]
    if not values:
        raise Malformed("no call")
    return [_call(value) for value in values]


def read_kimi(body: str, tools: Tools) -> list[Call]:
    """Read functions.NAME:INDEX<|tool_call_argument_begin|>{...}; the first part is the call's id."""
    head, separator, arguments = body.partition(KIMI_ARGUMENTS)
    match = _KIMI_ID.fullmatch(head.strip())
    if not separator or match is None:
        raise Malformed("no arguments")
    return [Call(match["name"], _object(arguments), head.strip() if match["index"] else "")]


def read_deepseek(body: str, tools: Tools) -> list[Call]:
    """Read NAME<｜tool▁sep｜>{...} (V3.1), or function<｜tool▁sep｜>NAME, a newline, {...} in a ```json fence (V3)."""
    head, separator, rest = body.partition(DEEPSEEK_SEPARATOR)
    if head.strip() == "function" and "```" in rest:
        head, _, rest = rest.partition("\n")
    if not separator or not head.strip():
        raise Malformed("no name")
    fenced = _FENCED.fullmatch(rest.strip())
    return [Call(head.strip(), _object(fenced[1] if fenced else rest))]


def read_mistral(body: str, tools: Tools) -> list[Call]:
    """Read NAME[ARGS]{...} or NAME[CALL_ID]id[ARGS]{...} (tokenizer 11 and later), or a list of objects."""
    match = _MISTRAL.fullmatch(body)
    if match is None:
        return read_json(body, tools)
    return [Call(match["name"], _object(match["arguments"]), match["id"] or "")]


def _object(text: str) -> dict[str, Any]:
    try:
        return load_json_object(text)
    except Malformed as error:
        if ends_in_string(text):
            raise _incomplete(error.__cause__) from None
        raise


def _values(text: str) -> Iterator[Any]:
    at = 0
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if ends_in_string(text):
                raise _incomplete(error) from error
            raise Malformed(str(error)) from error
        yield value


def _incomplete(error: object) -> Incomplete:
    """For an error of text that seems to end inside a string: certain if it is the only one."""
    if isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string"):
        return InString("the text ends inside a string")
    return Incomplete("the text may end inside a string")


def _call(value: Any) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise Malformed("no name")
    arguments = value.get("arguments", value.get("parameters"))
    number = value.get("id")
    return Call(name, as_arguments(arguments), number if isinstance(number, str) else "")


def ends_in_string(text: str) -> bool:
    """Return True if JSON text ends inside a string."""
    return any(not string["end"] for string in _STRING.finditer(text))  # only the last one can lack its end
