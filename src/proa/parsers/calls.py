"""Calls as a model wrote them, and the JSON text of their arguments."""

from __future__ import annotations

import ast
import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """One complete call. id: the model's own, empty if the format has none."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Tools:
    """The parameter schemas of the request's functions, by name."""

    schemas: Mapping[str, Schema] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: list[dict[str, Any]] | None) -> Tools:
        """Read tools in OpenAI's form."""
        functions = [tool.get("function") or {} for tool in tools or []]
        return cls({str(f.get("name")): s if isinstance(s := f.get("parameters"), dict) else {} for f in functions})

    def parameter(self, function: str, name: str) -> tuple[Schema | None, Schema]:
        """Return (the parameter's schema, None if it has none; the function's schema, in which $ref points)."""
        schema = self.schemas.get(function, {})
        properties = schema.get("properties")
        own = properties.get(name) if isinstance(properties, dict) else None
        return (own if isinstance(own, dict) else None), schema


class Malformed(ValueError):
    """The text between a call's delimiters is not a call of the format."""


class Incomplete(ValueError):
    """The delimiter that seemed to end the call lies inside one of its values."""


class InString(Incomplete):
    """It lies inside a string of JSON: there it is text, even if the model generated it as a token, as models do that
    write about calls."""


MakeId = Callable[[Call, int], str]  # (call, its index in the conversation) -> the call's id
_ALPHANUMERIC = string.ascii_letters + string.digits


def openai_id(call: Call, index: int) -> str:
    return call.id or f"call_{secrets.token_hex(12)}"


def kimi_id(call: Call, index: int) -> str:
    return call.id if ":" in call.id else f"functions.{call.name}:{index}"


def mistral_id(call: Call, index: int) -> str:
    return call.id or "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def load_json(text: str) -> Any:
    """Parse JSON; Malformed for NaN, infinities, and anything else that is not JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant, strict=False)  # models write newlines into strings
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _no_constant(name: str) -> NoReturn:
    raise Malformed(f"{name} is not JSON")


def load_json_object(text: str) -> dict[str, Any]:
    value = load_json(text)
    if not isinstance(value, dict):
        raise Malformed("not a JSON object")
    return value


def load_loosely(text: str) -> Any:
    """Parse JSON, else a Python literal. Raises Malformed."""
    try:
        return load_json(text)
    except Malformed:
        pass
    try:
        return load_json(dump_json(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed(str(error)) from error


def dump_json(value: Any) -> str:
    """Write valid JSON that can be encoded as UTF-8: a lone surrogate, which clients cannot send back, becomes U+FFFD.
    Raises Malformed for numbers that JSON cannot express."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error
    return text


def as_arguments(value: Any) -> dict[str, Any]:
    """Return a call's arguments as an object: some models write them as a string of JSON, or as null for none."""
    if isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Malformed("the arguments are not an object")
    return value
