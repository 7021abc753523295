"""Parse and validate the body of an HTTP request into a request object of schema.py or anthropic_schema.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from starlette.requests import Request

from proa.server.body import decode, read_body
from proa.server.errors import ApiError, from_validation
from proa.server.fields import implemented_fields, refuse_unknown
from proa.server.precheck import LARGE_BYTES
from proa.server.schema import ApiRequest
from proa.server.service import Service

IGNORED_HEADER = "x-proa-ignored-fields"
_MAX_HEADER_CHARACTERS = 1000

R = TypeVar("R", bound=ApiRequest)


@dataclass(frozen=True)
class Validated(Generic[R]):
    """A request, the implemented fields it was made from, and the names of unknown and of ignored fields."""

    asked: R
    fields: dict[str, Any]
    unknown: list[str]
    ignored: list[str]


async def read_request(request: Request, service: Service, schema: type[R]) -> tuple[R, list[str]]:
    """Return (validated request, names of fields without effect). Raises ApiError or RequestError."""
    strict = service.options.strict
    parts = await service.unless_draining(read_body(request))
    if service.precheck is not None and sum(map(len, parts)) > LARGE_BYTES:
        parts = [await service.precheck.reduced(parts, schema.__name__, strict=strict)]
    await service.turns.next()
    valid = validated(decode(b"".join(parts)), schema, strict=strict)
    unknown = [*valid.unknown, *valid.asked.unknown_options]
    service.warn_unknown(unknown)
    service.check_model(valid.asked.model)
    return valid.asked, [*unknown, *valid.ignored, *valid.asked.unused_options]


def validated(body: dict[str, Any], schema: type[R], *, strict: bool) -> Validated[R]:
    """Validate a parsed body. Raises ApiError or RequestError."""
    try:
        fields, unknown, ignored = implemented_fields(body, schema.model_fields, schema.endpoint, strict=strict)
        asked = schema.model_validate(fields)
    except RecursionError as error:
        raise ApiError(400, "invalid_value", "The request is nested too deeply.") from error
    except ValidationError as error:
        raise from_validation(error) from error
    if strict:
        refuse_unknown(asked.unknown_options)
    return Validated(asked, fields, unknown, ignored)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Build the header that lists fields without effect, percent-encoded. At the length limit it lists whole names and
    a count of the rest: a truncated percent-escape would be invalid."""
    if not names:
        return {}
    shown: list[str] = []
    room = _MAX_HEADER_CHARACTERS
    for name in names:
        written = quote(name or '""', safe="$[]")
        room -= len(written) + len(", ")
        if room < 0:
            break
        shown.append(written)
    more = [f"{len(names) - len(shown)} more"] if len(shown) < len(names) else []
    return {IGNORED_HEADER: ", ".join(shown + more)}
