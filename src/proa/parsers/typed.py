"""Values of parameters that a model writes as plain text, such as <parameter=days>3</parameter>, typed by the schema.

A value that does not fit its type stays a string: the program that gets the call can say what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from proa.parsers.calls import Malformed, Schema, load_json, load_loosely

_INTEGER = re.compile(r"-?(0|[1-9]\d*)")
_PYTHON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_DEPTH = 8  # of nested anyOf and $ref


def typed(text: str, schema: Schema | None, root: Schema, *, unknown: str = "string") -> Any:
    """Convert a value. schema: the parameter's, None if it has none; root: where its $ref points. unknown: type of
    values without a schema, "string" or "any"."""
    kinds = {unknown} if schema is None else set(_kinds(schema, root, _DEPTH)) or {"any"}
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
    return schema is None or "string" in set(_kinds(schema, root, _DEPTH))


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


def _kinds(schema: Schema, root: Schema, depth: int) -> Iterator[str]:
    """Yield the JSON types that a schema allows; nothing if it does not say."""
    if depth == 0:
        return
    stated = schema.get("type")
    if isinstance(stated, str):
        yield stated
    elif isinstance(stated, list):
        yield from (kind for kind in stated if isinstance(kind, str))
    elif "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        yield from (_PYTHON_TYPES.get(type(v), "array" if isinstance(v, list) else "object") for v in values)
    elif "properties" in schema:
        yield "object"
    elif "items" in schema:
        yield "array"
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                yield from _kinds(part, root, depth - 1)
    target = reference(schema.get("$ref"), root)
    if target is not None:
        yield from _kinds(target, root, depth - 1)
    if schema.get("nullable") is True:
        yield "null"


def reference(ref: Any, root: Schema) -> Schema | None:
    """Return the schema that a $ref of the form "#/$defs/Name" points to, or None."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found: Any = root
    for step in ref[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
