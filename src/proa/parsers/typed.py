"""Values of parameters that a model writes as plain text, such as <parameter=days>3</parameter>, typed by the schema.

A value that does not fit its type stays a string: the program that gets the call can say what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from proa.grammar.json_schema import reference
from proa.parsers.calls import Malformed, Schema, load_json, load_loosely

_INTEGER = re.compile(r"-?(0|[1-9]\d*)")
_PYTHON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def typed(text: str, schema: Schema | None, root: Schema, *, unknown: str = "string") -> Any:
    """Convert a value. schema: the parameter's, None if it has none; root: where its $ref points. unknown: type of
    values without a schema, "string" or "any"."""
    kinds = {unknown} if schema is None else _kinds(schema, root) or {"any"}
    if kinds == {"string"}:
        return text
    word = text.strip()
    if word in ("null", "None") and kinds & {"null", "any"}:
        return None
    if word.lower() in ("true", "false") and kinds & {"boolean", "any"}:
        return word.lower() == "true"
    if kinds & {"integer", "number", "any"} and (number := _number(word, kinds)) is not None:
        return number
    if kinds & {"object", "array", "any"}:
        container = _container(word, kinds)
        if container is not None:
            return container
    return text


def is_text(schema: Schema | None, root: Schema) -> bool:
    """Return True if a parameter's value is, or may be, any text."""
    return schema is None or "string" in _kinds(schema, root)


def _number(word: str, kinds: set[str]) -> int | float | None:
    if _INTEGER.fullmatch(word):
        return _int(word)
    try:
        value = load_json(word)
    except Malformed:
        return None
    if not isinstance(value, float) or value in (float("inf"), float("-inf")):
        return None
    if kinds & {"number", "any"}:
        return value
    return int(value) if value.is_integer() else None


def _int(word: str) -> int | None:
    try:
        return int(word)
    except ValueError:  # thousands of digits
        return None


def _container(word: str, kinds: set[str]) -> Any:
    if not word.startswith(("{", "[", "(", '"')):
        return None
    try:
        value = load_loosely(word)
    except Malformed:
        return None
    if isinstance(value, dict):
        return value if kinds & {"object", "any"} else None
    if isinstance(value, list):
        return value if kinds & {"array", "any"} else None
    return value if "any" in kinds else None


def _kinds(schema: Schema, root: Schema) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    kinds: set[str] = set()
    seen: set[int] = set()  # ids: a definition may stand behind any number of references
    left: list[Any] = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        kinds.update(_stated(one))
        for word in ("anyOf", "oneOf", "allOf"):
            parts = one.get(word)
            left += parts if isinstance(parts, list) else ()
        left.append(reference(one.get("$ref"), root))
        if one.get("nullable") is True:
            kinds.add("null")
    return kinds


def _stated(schema: Schema) -> Iterable[str]:
    """Return the types that a schema states itself, or shows by its values or keywords."""
    stated = schema.get("type")
    if isinstance(stated, str):
        return (stated,)
    if isinstance(stated, list):
        return (kind for kind in stated if isinstance(kind, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        return (_PYTHON_TYPES.get(type(v), "array" if isinstance(v, list) else "object") for v in values)
    return ("object",) if "properties" in schema else ("array",) if "items" in schema else ()
