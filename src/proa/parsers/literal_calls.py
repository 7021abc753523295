"""Readers of calls written as expressions: Python's, and Gemma 4's objects with quoted strings."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from proa.parsers.calls import Call, Incomplete, Malformed, Tools, load_json_object
from proa.parsers.json_calls import ends_in_string

GEMMA_QUOTE = '<|"|>'
_NAMED = {"true": True, "false": False, "null": None}
_GEMMA_CALL = re.compile(r"\s*call:\s*([^\s{]+)\s*(\{.*\})\s*", re.DOTALL)
_JSON_CALL = re.compile(r"\s*\[?\s*([A-Za-z_][\w.-]*)\(\*\*(\{.*\})\)\s*\]?\s*", re.DOTALL)
_WORD = re.compile(r"[^,:{}\[\]\s]+")
_DEPTH = 64


def read_pythonic(body: str, tools: Tools) -> list[Call]:
    """Read [f(a=1, b="x"), g()]: keyword arguments that are literals (Llama 4, LFM2). Or [f(**{"a": 1})], with JSON:
    the form of forced calls."""
    if match := _JSON_CALL.fullmatch(body):
        try:
            return [Call(match[1], load_json_object(match[2]))]
        except Malformed:
            pass
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        read = [_python_call(call) for call in calls]
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise Malformed(str(error)) from error
    if not read:
        raise Malformed("no call")
    return read


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise Malformed("not a call with keyword arguments")
    return Call(ast.unparse(node.func), {_key(k): _literal(k.value) for k in node.keywords})


def _key(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise Malformed("** in a call")
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMED:
        return _NAMED[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if any(not isinstance(key, ast.Constant) for key in node.keys):
            raise Malformed("a key is not a literal")
        return {str(ast.literal_eval(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise Malformed(f"{type(value).__name__} has no JSON form")
    return value


def read_gemma(body: str, tools: Tools) -> list[Call]:
    """Read call:NAME{key:<|"|>text<|"|>,other:[1,true]}: keys without quotes, strings between quote tokens (Gemma). Or
    JSON arguments, the form of forced calls."""
    match = _GEMMA_CALL.fullmatch(body)
    if match is None:
        is_cut = body.count(GEMMA_QUOTE) % 2 or ends_in_string(body)
        raise (Incomplete if is_cut else Malformed)("no call")
    try:
        return [Call(match[1], load_json_object(match[2]))]
    except Malformed:
        pass
    reader = _GemmaReader(match[2])
    return [Call(match[1], reader.whole_object())]


class _GemmaReader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole_object(self) -> dict[str, Any]:
        value = self._value(_DEPTH)
        self._skip_space()
        if not isinstance(value, dict) or self._at != len(self._text):
            raise Malformed("text after the arguments")
        return value

    def _value(self, depth: int) -> Any:
        self._skip_space()
        if depth == 0:
            raise Malformed("nested too deeply")
        if self._takes(GEMMA_QUOTE):
            return self._until_quote()
        if self._takes("{"):
            return self._pairs(depth - 1)
        if self._takes("["):
            return self._items(depth - 1)
        return self._word()

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self._ends("}"):
            key = self._until_quote() if self._takes(GEMMA_QUOTE) else str(self._raw_word())
            self._expect(":")
            pairs[key.strip('"')] = self._value(depth)
        return pairs

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._ends("]"):
            items.append(self._value(depth))
        return items

    def _ends(self, close: str) -> bool:
        """Skip a comma; return True at the closing bracket."""
        self._skip_space()
        self._takes(",")
        self._skip_space()
        return self._takes(close)

    def _until_quote(self) -> str:
        end = self._text.find(GEMMA_QUOTE, self._at)
        if end < 0:
            raise Incomplete("a string without its end")
        text, self._at = self._text[self._at : end], end + len(GEMMA_QUOTE)
        return text

    def _word(self) -> Any:
        word = self._raw_word()
        try:
            return json.loads(word, parse_constant=str)
        except ValueError:
            return word

    def _raw_word(self) -> str:
        match = _WORD.match(self._text, self._at)
        if match is None:
            raise Malformed(f"no value at {self._at}")
        self._at = match.end()
        return match[0]

    def _expect(self, sign: str) -> None:
        self._skip_space()
        if not self._takes(sign):
            raise Malformed(f"no {sign!r} at {self._at}")

    def _takes(self, sign: str) -> bool:
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) if found else 0
        return found

    def _skip_space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
