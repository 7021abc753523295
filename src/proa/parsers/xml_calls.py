"""Readers of calls whose arguments are elements of plain text, typed by the function's schema."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from proa.parsers.calls import Call, Incomplete, Malformed, Tools, load_json_object, load_loosely
from proa.parsers.typed import typed

_FUNCTION = re.compile(
    r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*(?=<function=|\Z)|(?<=</parameter>)\s*\Z)", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|\Z)")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)
_NAME = re.compile(r"[^\s<>{}]+")


def read_functions(body: str, tools: Tools) -> list[Call]:
    """Read <function=NAME> with elements <parameter=KEY>, a newline, the value, a newline, </parameter> (Qwen3-Coder).

    A missing </parameter> is tolerated before another parameter of the function.
    """
    calls, at = [], 0
    while match := _FUNCTION.match(body, at):
        calls.append(_function(match[1].strip(), match[2], tools))
        at = match.end()
    if body[at:].strip():
        raise (Incomplete if "<function=" in body[at:] else Malformed)("a function without its end")
    if not calls:
        raise Malformed("no function")
    return calls


def read_bare_function(body: str, tools: Tools) -> list[Call]:
    """Read what stands between <function= and </function>, where a model left out <tool_call>."""
    if "<parameter=" in body and not body.rstrip().endswith("</parameter>"):
        raise Incomplete("a parameter without its end")
    return read_functions(f"<function={body}</function>", tools)


def _function(name: str, text: str, tools: Tools) -> Call:
    known = tools.schemas.get(name, {}).get("properties")
    arguments: dict[str, Any] = {}
    for key, value in _parameters(text, known if isinstance(known, dict) else ()):
        value = value.removeprefix("\n").removesuffix("\n")
        _put(arguments, key, typed(value, *tools.parameter(name, key)))
    return Call(name, arguments)


def _parameters(text: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    at = 0
    while match := _PARAMETER.search(text, at):
        if text[at : match.start()].strip():
            raise Malformed("text between parameters")
        end = _PARAMETER_END.search(text, match.end())
        until = len(text) if end is None else end.start()
        # A parameter of the function that begins on a line of its own: the one before it has no end.
        following = (m for m in _PARAMETER.finditer(text, match.end(), until) if m[1].strip() in known)
        unclosed = next((m for m in following if text[m.start() - 1] == "\n"), None)
        stop = until if unclosed is None else unclosed.start()
        yield match[1].strip(), text[match.end() : stop]
        at = stop if unclosed is not None or end is None else end.end()
    if text[at:].strip():
        raise Malformed("text after the parameters")


def read_arg_pairs(body: str, tools: Tools) -> list[Call]:
    """Read NAME, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>, with or without newlines (GLM)."""
    name = body.partition("<arg_key>")[0].strip()
    if not _NAME.fullmatch(name):
        raise Malformed("no name")
    at = body.index(name) + len(name)
    arguments: dict[str, Any] = {}
    while match := _PAIR.match(body, at):
        key = match[1].strip()
        _put(arguments, key, typed(match[2], *tools.parameter(name, key), unknown="any"))
        at = match.end()
    if body[at:].strip():
        raise Incomplete("an argument without its end")
    return [Call(name, arguments)]


class InvokeReader:
    """Reads the attributes and elements of <invoke name="f"><parameter name="k">v</parameter></invoke>. `prefix` stands
    before the elements' names: none for MiniMax-M2, "｜DSML｜" for DeepSeek-V3.2, whose parameters say if they are
    strings."""

    def __init__(self, prefix: str = "") -> None:
        element = re.escape(f"{prefix}parameter")
        self._head = re.compile(r"""\s*(?:name=)?["']?([^"'>\s]+)["']?\s*(>|\Z)""")
        self._value = re.compile(
            rf"""\s*<{element}\s+name=["']?([^"'>]+?)["']?(?:\s+string=["']?(\w+)["']?)?\s*>"""
            rf"""(.*?)</{element}>\s*(?=<{element}\s|\Z)""",
            re.DOTALL,
        )

    def __call__(self, body: str, tools: Tools) -> list[Call]:
        head = self._head.match(body)
        if head is None:
            raise Malformed("no name")
        name, at = head[1], head.end()
        if body[at:].lstrip().startswith("{"):
            return [Call(name, load_json_object(body[at:]))]
        arguments: dict[str, Any] = {}
        while match := self._value.match(body, at):
            key, is_string, value = match[1], match[2], match[3]
            if is_string is not None:
                _put(arguments, key, value if is_string == "true" else _loosely(value))
            else:
                _put(arguments, key, typed(value, *tools.parameter(name, key)))
            at = match.end()
        if body[at:].strip():
            raise Incomplete("a parameter without its end")
        return [Call(name, arguments)]


def _put(arguments: dict[str, Any], key: str, value: Any) -> None:
    if key in arguments:
        raise Malformed(f"{key} twice")
    arguments[key] = value


def _loosely(text: str) -> object:
    try:
        return load_loosely(text)
    except Malformed:
        return text
