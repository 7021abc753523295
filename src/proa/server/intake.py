"""From an HTTP request to one of schema.py's: the same for every endpoint with a body. Never: what is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from starlette.requests import Request

from proa.server.body import read_json
from proa.server.errors import ApiError, from_validation
from proa.server.fields import Endpoint, implemented_fields, refuse_unknown
from proa.server.schema import ApiRequest
from proa.server.service import Service

IGNORED_HEADER = "x-proa-ignored-fields"
_MAX_HEADER_CHARACTERS = 1000

R = TypeVar("R", bound=ApiRequest)


async def read_request(
    request: Request, service: Service, endpoint: Endpoint, schema: type[R]
) -> tuple[R, dict[str, str]]:
    """(the request, headers for its answer). Raises ApiError and RequestError for what cannot be read or heeded."""
    strict = service.options.strict
    body = await service.before_the_end(read_json(request))
    try:
        fields, unknown = implemented_fields(body, schema.model_fields, endpoint, strict=strict)
        asked = schema.model_validate(fields)
    except RecursionError as error:
        raise ApiError(400, "invalid_value", "The request is nested too deeply.") from error
    except ValidationError as error:
        raise from_validation(error) from error
    if strict:
        refuse_unknown(asked.unknown_options)
    unknown += asked.unknown_options
    service.warn_unknown(unknown)
    service.check_model(asked.model)
    return asked, _ignored_header(unknown)


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Names the unknown fields, if any; what does not belong into a header is percent-encoded. Whole names only, then
    how many more there are: a header cut in its middle may be none."""
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
