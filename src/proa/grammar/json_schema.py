"""Reads JSON Schemas, and rewrites what llguidance refuses though it can be enforced. Never: imports of llguidance.

Whatever llguidance cannot enforce in a schema is an error there, except `format`: JSON Schema defines it as an
annotation, so formats that llguidance does not know are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from proa.errors import RequestError
from proa.grammar.text_formats import TEXT_FORMATS
from proa.types import Constraint

# Without a bound, small models write line breaks until max_tokens.
WHITESPACE = r"( |\r?\n[ \t]{0,20})?"
_FORMATS = frozenset((*TEXT_FORMATS, "unknown"))
# Keywords whose values are schemas: one, a list, or one for each name.
_ONE = ("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
        "propertyNames", "not", "if", "then", "else")  # fmt: skip
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# Values that demand nothing, of keywords that llguidance does not know. zod writes the last one for each record.
_NO_DEMANDS: tuple[tuple[str, object], ...] = (("uniqueItems", False), ("propertyNames", {"type": "string"}))


def read_schema(constraint: Constraint) -> Any:
    """Parse and rewrite the JSON Schema. Raises RequestError."""
    try:
        schema = json.loads(constraint.text, parse_constant=_refuse_constant)
        _rewrite(schema, schema)
    except ValueError as error:
        raise constraint_error(constraint, f"the schema is not JSON: {error}", "Send a JSON Schema.") from error
    except RecursionError as error:
        raise constraint_error(constraint, "the schema is nested too deeply", "Flatten it.") from error
    if not isinstance(schema, dict | bool):
        raise constraint_error(constraint, "the schema is neither an object nor a boolean", "Send a JSON Schema.")
    return schema


def for_llguidance(constraint: Constraint) -> dict[str, Any]:
    """Return the schema with llguidance's options, which replace any that it came with. Raises RequestError."""
    schema = read_schema(constraint)
    whole = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    pattern = WHITESPACE if constraint.whitespace is None else constraint.whitespace
    return {**whole, "x-guidance": {"whitespace_pattern": pattern}}


def children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of each schema directly inside a schema."""
    for key in _ONE:
        if isinstance(schema.get(key), dict | bool):
            yield (key,), schema[key]
    for key in _MANY:
        if isinstance(schema.get(key), list):
            yield from (((key, str(i)), value) for i, value in enumerate(schema[key]))
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            yield from (((key, name), value) for name, value in schema[key].items())


def reference(ref: object, root: object) -> dict[str, Any] | None:
    """Return the schema that a $ref of the form "#/$defs/Name" points to, or None."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found: Any = root
    for step in ref[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def constraint_error(constraint: Constraint, what: str, remedy: str) -> RequestError:
    return RequestError(f"{constraint.param} cannot be used: {what}.", remedy, param=constraint.param)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _rewrite(schema: object, root: object) -> None:
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        del schema["format"]
    for key, value in _NO_DEMANDS:
        if key in schema and schema[key] == value and type(schema[key]) is type(value):
            del schema[key]
    if isinstance(schema.get("$ref"), str):  # generators write names with < and [ as they are, which no URI may have
        schema["$ref"] = quote(schema["$ref"], safe="#/:?&=%@!$'()*+,;~")
    if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema and _exclude_each_other(schema, root):
        schema["anyOf"] = schema.pop("oneOf")
    for _, child in children(schema):
        _rewrite(child, root)


def _exclude_each_other(schema: dict[str, Any], root: object) -> bool:
    """Return True if no value can be valid under two of the schemas of oneOf: their types, or the texts of one required
    property, differ. llguidance does not see that behind $ref. The property that a discriminator names (OpenAPI,
    pydantic) becomes a required one."""
    branches = [_target(branch, root) for branch in schema["oneOf"]]
    discriminator = schema.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(tag, str) and all(_texts(branch, tag) for branch in branches):
        for branch in branches:
            branch["required"] = [*(name for name in _required(branch) if name != tag), tag]
    objects = [branch for branch in branches if branch.get("type") == "object"]
    others = [kind for branch in branches if (kind := branch.get("type")) != "object"]
    if not all(isinstance(kind, str) for kind in others) or len(set(others)) < len(others):
        return False
    if {"integer", "number"} <= set(others):
        return False
    names = set[str]().union(*map(_required, objects[:1])).intersection(*map(_required, objects))
    return len(objects) < 2 or any(_tells_apart(name, objects) for name in names)


def _tells_apart(name: str, schemas: Sequence[Mapping[str, Any]]) -> bool:
    texts = [_texts(schema, name) for schema in schemas]
    return all(texts) and len(set[str]().union(*texts)) == sum(map(len, texts))


def _target(schema: object, root: object) -> dict[str, Any]:
    """Return the schema that a $ref within the document points to; without one the schema itself."""
    own = schema if isinstance(schema, dict) else {}
    return reference(own.get("$ref"), root) or own


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _texts(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the texts that a property may be; empty if it may be anything else."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, dict) else None
    values = (own["enum"] if "enum" in own else [own.get("const")]) if isinstance(own, dict) else None
    return set(values) if isinstance(values, list) and all(isinstance(value, str) for value in values) else set()
