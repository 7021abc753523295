"""Grammars of answers with calls: of calls that a request forces, and of calls whose schemas are strict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from proa.errors import RequestError
from proa.grammar.json_schema import for_llguidance, reference
from proa.grammar.text_formats import TEXT_FORMATS
from proa.parsers.calls import Schema
from proa.parsers.formats import CallFormat
from proa.parsers.typed import is_text
from proa.types import Constraint, Tag, Tags

_CHOICES = ("anyOf", "oneOf", "allOf")
_ANY = r"/(.|\n)*/"
_MARKS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)  # of a pattern: escapes and classes whole


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
    tagged = "STRING" in begin  # the form says of each value whether it is a string
    rules, order = [], []
    for i, (key, value) in enumerate(properties.items()):
        order.append(f"p{i}" if key in required else f"p{i}?")
        forms = list(_forms(value if isinstance(value, dict) else {}, schema, f"{path}.properties.{key}"))
        ways = []
        for is_string in (True, False) if tagged else (None,):
            own = _literal(begin.replace("STRING", json.dumps(is_string)).replace("KEY", key))
            if not (group := [form for form in forms if is_string in (None, form.is_string)]):
                continue
            if any(form.kind == "text" for form in group):
                ways.append(f"{own} v{i}")
                rules.append(f"v{i}[lazy]: {_until(end, group)}")
            else:
                ways.append(f"{own} ({' | '.join(form.grammar for form in group)}) {_literal(end)}")
        rules.append(f"p{i}: {' | '.join(ways)}")
    return "\n".join([f"start: {' '.join(order) or _literal('')}", *rules])


def _until(end: str, forms: Sequence[_Form]) -> str:
    """Write the lexeme of a value of these forms and its end. Beside text, JSON is no lexeme of its own: then the value
    is any text."""
    limited = [form.grammar for form in forms if form.kind == "text" and form.grammar]
    if len(limited) < sum(form.kind == "text" for form in forms) or any(form.kind == "json" for form in forms):
        return f"{_ANY} {_literal(end)}"
    held = [f"({text} & ~({_ANY} {_literal(end)} {_ANY}))" for text in limited]
    return f"({' | '.join([*held, *(form.grammar for form in forms if form.kind == 'literal')])}) {_literal(end)}"


def _any_parameters(written: str) -> str:
    """Write a Lark grammar for parameters of any name and value, in the form `written`."""
    begin, _, end = written.partition("VALUE")
    head, _, tail = begin.partition("KEY")
    tails = dict.fromkeys(_literal(tail.replace("STRING", word)) for word in ("true", "false"))
    rule = f'p: {_literal(head)} /[^<>"\\n]+/ ({" | ".join(tails)}) v'
    return f"start: p*\n{rule}\nv[lazy]: /(.|\\n)*/ {_literal(end)}"


class _Form(NamedTuple):
    """A form that a value may have. grammar: of a text its limits, a terminal; empty for any text."""

    is_string: bool
    kind: Literal["text", "literal", "json"]
    grammar: str


def _forms(schema: Schema, root: Schema, path: str) -> Iterator[_Form]:
    """Yield the forms that a value may have."""
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
            yield from (_Form(True, "literal", _literal(value)) for value in values if isinstance(value, str))
            if others := [value for value in values if not isinstance(value, str)]:
                yield _Form(False, "json", _json({"enum": others}, root, path))
        elif parts and all(isinstance(part, dict) for part in parts) and ("allOf" not in one or len(parts) == 1):
            left += parts
        elif isinstance(kinds, list) and "string" in kinds:
            left += [{**one, "type": kind} for kind in kinds]
        elif is_text(one, root):
            yield _Form(True, "text", _limits(one, path))
        elif kinds == "null":
            yield _Form(False, "literal", _literal("null"))
        else:
            yield _Form(False, "json", _json(one, root, path))


def _limits(schema: Schema, path: str) -> str:
    """Write the terminal of a string's length, pattern and format; empty if the schema limits none. Raises
    RequestError."""
    least, most, pattern = (schema.get(word) for word in ("minLength", "maxLength", "pattern"))
    for word, value in (("minLength", least), ("maxLength", most)):
        if value is not None and (type(value) is not int or value < 0):
            raise RequestError(f"{path}.{word} is {str(value)[:100]!r}.", "Send a length.", param=f"{path}.{word}")
    if not isinstance(pattern, str | None):
        raise RequestError(f"{path}.pattern is {str(pattern)[:100]!r}.", "Send a text.", param=f"{path}.pattern")
    found = [f"({' | '.join(map(_searched, _ways(pattern)))})"] if pattern is not None else []
    if (form := TEXT_FORMATS.get(str(schema.get("format")))) is not None:
        found.append(f"/{form}/")
    if least or most is not None:
        found.append(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/")
    return " & ".join(found)


def _ways(pattern: str) -> list[str]:
    """Split a pattern at its outermost |."""
    cuts, depth = [-1], 0
    for match in _MARKS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if match[0] == "|" and depth == 0:
            cuts.append(match.start())
    return [pattern[a + 1 : b] for a, b in pairwise([*cuts, len(pattern)])]


def _searched(pattern: str) -> str:
    """Write a terminal of the texts in which a pattern without an outermost | is found."""
    inner = pattern.removeprefix("^")
    ends = re.search(r"(?<!\\)(\\\\)*\$\Z", inner) is not None
    inner = inner[:-1] if ends else inner
    plain = re.sub(
        r"\\.|[/\n]", lambda m: {"\\d": "[0-9]", "/": r"\/", "\n": r"\n"}.get(m[0], m[0]), inner, flags=re.DOTALL
    )
    before, after = "" if pattern.startswith("^") else r"(.|\n)*", "" if ends else r"(.|\n)*"
    return f"/{before}(?:{plain}){after}/"


def _json(schema: Schema, root: Schema, path: str) -> str:
    """Write the grammar of a JSON value."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps(for_llguidance(Constraint.json({**shared, **schema}, param=path)))}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
