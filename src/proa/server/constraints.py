"""Reads the request fields that constrain an answer's text: OpenAI's, vLLM's, SGLang's and llama.cpp's.

A request has at most one constraint. Schemas and grammars are compiled later, which finds their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from proa.errors import RequestError
from proa.types import Constraint, Tag, Tags

# One request field, or one key of structured_outputs, each.
Reader = Callable[[Any, str], Constraint | None]


def constraint_of(fields: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a request, by its fields. Raises RequestError if there are two, or one is malformed."""
    found = _read(fields, READERS, "")
    pattern = fields.get("guided_whitespace_pattern")
    return _with_whitespace(found, pattern, "guided_whitespace_pattern")


def _read(fields: Mapping[str, Any], readers: Mapping[str, Reader], prefix: str) -> Constraint | None:
    found: dict[str, Constraint] = {}
    for name, read in readers.items():
        if fields.get(name) is not None and (constraint := read(fields[name], prefix + name)) is not None:
            found[prefix + name] = constraint
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(
            f"{first} and {second} both constrain the answer.", "Send only one of them.", param=second
        )  # fmt: skip
    return next(iter(found.values()), None)


def _with_whitespace(constraint: Constraint | None, pattern: object, param: str) -> Constraint | None:
    if pattern is None:
        return constraint
    if constraint is None or constraint.kind != "json" or not isinstance(pattern, str):
        raise RequestError(
            f"{param} is {pattern!r}.", "Send a regular expression, beside a JSON Schema only.", param=param
        )  # fmt: skip
    return Constraint.json(constraint.text, whitespace=pattern, param=constraint.param)


def _schema(value: Any, param: str) -> Constraint:
    if not isinstance(value, dict | bool | str):
        raise _malformed(param, value, "a JSON Schema, as an object or as its text")
    return Constraint.json(value, param=param)


def _any_object(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise _malformed(param, value, "true or false")
    return Constraint.json({"type": "object"}, param=param) if value else None


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(option, str) for option in value):
        raise _malformed(param, value, "a list of one or more strings")
    return Constraint.choice(value, param=param)


def _text(make: Callable[..., Constraint]) -> Reader:
    def read(value: Any, param: str) -> Constraint | None:
        if not isinstance(value, str):
            raise _malformed(param, value, "a string")
        return make(value, param=param) if value else None

    return read


def _response_format(value: Any, param: str) -> Constraint | None:
    match _object(value, param):
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema}:  # llama.cpp's form
            return _schema(schema, f"{param}.schema")
        case {"type": "json_object"}:
            return _any_object(True, param)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _schema(schema, f"{param}.json_schema.schema")
        case {"type": "json_schema", "schema": schema}:
            return _schema(schema, f"{param}.schema")
        case {"type": "structural_tag"}:
            return _structural_tag(value, param)
    raise _malformed(param, value, "of type text, json_object, json_schema (with json_schema.schema) or structural_tag")


def _structured_outputs(value: Any, param: str) -> Constraint | None:
    fields = _object(value, param)
    if unknown := set(fields) - {*_STRUCTURED, "whitespace_pattern", *_OF_BACKENDS}:
        raise _malformed(
            f"{param}.{min(unknown)}", fields[min(unknown)], f"left out; {', '.join(_STRUCTURED)} are known"
        )
    pattern = fields.get("whitespace_pattern")
    return _with_whitespace(_read(fields, _STRUCTURED, f"{param}."), pattern, f"{param}.whitespace_pattern")


def _structural_tag(value: Any, param: str) -> Constraint:
    fields = _object(_parsed(value, param), param)
    if "format" in fields:
        return _format(_object(fields["format"], f"{param}.format"), f"{param}.format")
    match fields:
        case {"structures": [*structures], "triggers": [*triggers]}:
            tags = [
                _tag({**_object(one, param), "content": one.get("schema", True)}, f"{param}.structures[{i}]", "schema")
                for i, one in enumerate(structures)
            ]
            return Constraint.tags(Tags(tags=tuple(tags), triggers=_texts(triggers, param), at_least=0), param=param)
    raise _malformed(param, value, "an object with structures and triggers, or with format")


def _format(fields: dict[str, Any], param: str) -> Constraint:
    least, most = int(fields.get("at_least_one") is True), 1 if fields.get("stop_after_first") is True else None
    match fields:
        case {"type": "tag"}:
            return Constraint.tags(Tags(tags=(_tag(fields, param),), at_most=1), param=param)
        case {"type": "triggered_tags", "tags": [*tags], "triggers": [*triggers]}:
            read = tuple(_tag(one, f"{param}.tags[{i}]") for i, one in enumerate(tags))
            found = Tags(tags=read, triggers=_texts(triggers, param), at_least=least, at_most=most)
            return Constraint.tags(found, param=param)
        case {"type": "tags_with_separator", "tags": [*tags], "separator": str(separator)}:
            read = tuple(_tag(one, f"{param}.tags[{i}]") for i, one in enumerate(tags))
            found = Tags(tags=read, separator=separator, at_least=least, at_most=most)
            return Constraint.tags(found, param=param)
    return _content(fields, param)


def _content(value: Any, param: str) -> Constraint:
    match _object(value, param):
        case {"type": "json_schema", "json_schema": schema}:
            return _schema(schema, f"{param}.json_schema")
        case {"type": "regex", "pattern": str(pattern)}:
            return Constraint.regex(pattern, param=f"{param}.pattern")
        case {"type": "grammar", "grammar": str(grammar)}:
            return Constraint.grammar(grammar, param=f"{param}.grammar")
        case {"type": "const_string", "value": str(text)}:
            return Constraint.choice([text], param=f"{param}.value")
    raise _malformed(
        param, value, "of type tag, triggered_tags, tags_with_separator, json_schema, regex, grammar or const_string"
    )


def _tag(value: Any, param: str, schema: str = "") -> Tag:
    """schema: name of the key with a JSON Schema, of the older form."""
    match _object(value, param):
        case {"begin": str(begin), "content": content, "end": str(end)}:
            read = _schema(content, f"{param}.{schema}") if schema else _content(content, f"{param}.content")
            return Tag(begin, read, end)
    raise _malformed(param, value, f"an object with begin, {schema or 'content'} and end")


def _texts(values: list[Any], param: str) -> tuple[str, ...]:
    if not values or not all(isinstance(value, str) and value for value in values):
        raise _malformed(f"{param}.triggers", values, "a list of one or more texts")
    return tuple(values)


def _parsed(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(param, value, "an object, or its text as JSON") from error


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(param, value, "an object")
    return value


def _malformed(param: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{param} is {str(value)[:100]!r}.", f"It must be {expected}.", param=param)


_regex, _grammar = _text(Constraint.regex), _text(Constraint.grammar)
_STRUCTURED: dict[str, Reader] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
# Options of vLLM's grammar libraries; they change no text that is allowed here.
_OF_BACKENDS = ("disable_fallback", "backend")
READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "regex": _regex,
    "ebnf": _grammar,
    "json_schema": _schema,
    "structural_tag": _structural_tag,
    "grammar": _grammar,
}
CONSTRAINING = (*READERS, "guided_whitespace_pattern")
