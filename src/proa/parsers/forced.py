"""Grammars of answers with calls: of calls that a request forces, and of calls whose schemas are strict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from proa.errors import RequestError
from proa.grammar.json_schema import for_llguidance, reference
from proa.parsers.calls import Schema
from proa.parsers.formats import CallFormat
from proa.parsers.typed import is_text
from proa.types import Constraint, Tag, Tags

_CHOICES = ("anyOf", "oneOf", "allOf")


def call_grammar(
    calls: CallFormat | None, tools: Sequence[dict[str, Any]], forced: Sequence[str], *, only_one: bool
) -> Constraint | None:
    """Constrain the calls of an answer to what the functions' schemas accept.

    forced: the answer is one or more calls of these functions. If empty, calls of any function may stand in free text;
    a function without `strict` then takes any arguments. only_one: at most one call. Returns None for a format without
    a grammar. Raises RequestError for parameters of the wrong type.
    """
    if calls is None or not calls.written:
        return None
    tags = _tags(calls, tools, forced)
    at_most = 1 if only_one or calls.ends_answer else None
    if forced:
        return Constraint.tags(Tags(tags=tags, separator="\n", at_most=at_most), param="tool_choice")
    if not calls.trigger:
        return None
    found = Tags(tags=tags, triggers=(calls.trigger,), at_least=0, at_most=at_most)
    return Constraint.tags(found, param="tools")


def text_or_call(calls: CallFormat | None, tools: Sequence[dict[str, Any]], text: Tag) -> Constraint:
    """Constrain an answer to a text of a given form, or to one call; if the format has no grammar, to the text."""
    others = _tags(calls, tools, ()) if calls is not None and calls.written else ()
    return Constraint.tags(Tags(tags=(text, *others), at_most=1), param=text.content.param)


def _tags(calls: CallFormat, tools: Sequence[dict[str, Any]], forced: Sequence[str]) -> tuple[Tag, ...]:
    functions = {str(tool["function"].get("name")): tool["function"] for tool in tools}
    tags = []
    for name in forced or functions:
        begin, _, end = calls.written.partition("ARGUMENTS")
        begin = begin.replace("NAME", name)
        is_free = not forced and functions[name].get("strict") is not True
        schema, path = functions[name].get("parameters") or {"type": "object"}, f"tools[{name}].parameters"
        if not calls.parameter:
            content = Constraint.json({"type": "object"} if is_free else schema, param=path)
        elif is_free:
            content = Constraint.grammar(_any_parameters(calls.parameter), param=path)
        else:
            _check(schema, path)
            content = Constraint.grammar(_parameters(calls.parameter, schema, path), param=path)
        tags.append(Tag(begin, content, end))
    return tuple(tags)


def _check(schema: Any, path: str) -> None:
    """Refuse what `_parameters` cannot read; the grammar library checks the parameters' own schemas."""
    if not isinstance(schema, dict):
        raise RequestError(f"{path} is {str(schema)[:100]!r}.", "It must be a JSON Schema, as an object.", param=path)
    properties = schema.get("properties")
    for key, value in properties.items() if isinstance(properties, dict) else ():
        enum = value.get("enum") if isinstance(value, dict) else None
        if enum is not None and not isinstance(enum, list):
            place = f"{path}.properties.{key}.enum"
            raise RequestError(f"{place} is {str(enum)[:100]!r}.", "It must be a list.", param=place)


def _parameters(written: str, schema: Schema, path: str) -> str:
    """Write a Lark grammar for the parameters of a function, in the order of its schema, in the form `written`."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    begin, _, end = written.partition("VALUE")
    rules, order = [], []
    for i, (key, value) in enumerate(properties.items()):
        order.append(f"p{i}" if key in required else f"p{i}?")
        forms = list(_forms(value if isinstance(value, dict) else {}, schema, f"{path}.properties.{key}"))
        has_any_text = (True, "") in forms
        ways = []
        for is_string in (True, False):
            texts = " | ".join(form for kind, form in forms if kind == is_string and form)
            own = _literal(begin.replace("STRING", json.dumps(is_string)).replace("KEY", key))
            if is_string and has_any_text:
                ways.append(f"{own} v{i}")
                rules.append(f"v{i}[lazy]: /(.|\\n)*/ {_literal(end)}")
            elif texts and not (has_any_text and "STRING" not in begin):  # any text includes the others
                ways.append(f"{own} ({texts}) {_literal(end)}")
        rules.append(f"p{i}: {' | '.join(ways)}")
    return "\n".join([f"start: {' '.join(order) or _literal('')}", *rules])


def _any_parameters(written: str) -> str:
    """Write a Lark grammar for parameters of any name and value, in the form `written`."""
    begin, _, end = written.partition("VALUE")
    head, _, tail = begin.partition("KEY")
    tails = dict.fromkeys(_literal(tail.replace("STRING", word)) for word in ("true", "false"))
    rule = f'p: {_literal(head)} /[^<>"\\n]+/ ({" | ".join(tails)}) v'
    return f"start: p*\n{rule}\nv[lazy]: /(.|\\n)*/ {_literal(end)}"


def _forms(schema: Schema, root: Schema, path: str) -> Iterator[tuple[bool, str]]:
    """Yield the forms that a value may have: whether it is a string, and its grammar; empty for any text."""
    seen: set[int] = set()  # ids: a definition may stand behind any number of references
    left: list[Schema] = [schema]
    while left:
        one = left.pop()
        values = [one["const"]] if "const" in one else one.get("enum")
        parts: list[Any] = next((p for word in _CHOICES if isinstance(p := one.get(word), list)), [])
        kinds = one.get("type")
        if (target := reference(one.get("$ref"), root)) is not None:
            left += [] if id(target) in seen else [{**target, **{k: v for k, v in one.items() if k != "$ref"}}]
            seen.add(id(target))
        elif isinstance(values, list) and values:
            yield from ((True, _literal(value)) for value in values if isinstance(value, str))
            if others := [value for value in values if not isinstance(value, str)]:
                yield False, _json({"enum": others}, root, path)
        elif parts and all(isinstance(part, dict) for part in parts) and ("allOf" not in one or len(parts) == 1):
            left += parts
        elif isinstance(kinds, list) and "string" in kinds:
            left += [{**one, "type": kind} for kind in kinds]
        elif is_text(one, root):
            yield True, ""
        else:
            yield False, _json(one, root, path)


def _json(schema: Schema, root: Schema, path: str) -> str:
    """Write the grammar of a JSON value."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps(for_llguidance(Constraint.json({**shared, **schema}, param=path)))}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
