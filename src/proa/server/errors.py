"""HTTP errors in OpenAI's format: {"error": {message, type, param, code}}. Anthropic's is in anthropic_errors.py."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from proa.errors import EngineDead, ProaError, QueueFull, ShuttingDown

_RETRY_AFTER_S: dict[type[ProaError], int] = {QueueFull: 2, ShuttingDown: 10, EngineDead: 10}
_TYPE_BY_STATUS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """An HTTP error response. `code` is machine-readable; `param` is the field at fault, such as messages[0].role."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    @property
    def type(self) -> str:
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPE_BY_STATUS.get(self.status, fallback)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Build a JSON response from plain values and msgspec structs."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def from_proa(error: ProaError) -> ApiError:
    """Convert a ProaError: its HTTP status, its message with remedy, its `kind` as the code."""
    code = "invalid_value" if error.kind == "invalid_request_error" else error.kind
    retry_after_s = _RETRY_AFTER_S.get(type(error))
    return ApiError(error.http_status, code, str(error), param=error.param, retry_after_s=retry_after_s)


def from_validation(error: ValidationError) -> ApiError:
    """Convert pydantic's errors: report the first invalid field, and how many others there are."""
    first, *others = error.errors(include_url=False, include_context=False)
    param = field_path(first["loc"])
    missing = first["type"] == "missing"
    message = f"{param} is missing." if missing else f"{param}: {first['msg'].removeprefix('Value error, ')}."
    if others:
        message += f" {len(others)} more field(s) are invalid."
    return ApiError(400, "missing_required_parameter" if missing else "invalid_value", message, param=param)


def internal(request_id: str) -> ApiError:
    """Build the error for an unexpected exception: it names the request id to look up in the server's log."""
    message = f"Internal error in Proa: search the server's log for {request_id}, and report it."
    return ApiError(500, "internal_error", message)


def field_path(location: tuple[int | str, ...]) -> str:
    """Format a pydantic location: ("messages", 0, "role") -> messages[0].role. Tags of unions, "#...", are left out."""
    named = [part for part in location if isinstance(part, int) or not part.startswith("#")]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named)
    return path.removeprefix(".") or "body"
