"""Errors in the format of Anthropic's API: {"type": "error", "error": {type, message}, request_id}."""

from __future__ import annotations

from proa.server.anthropic_replies import ErrorDetails, ErrorReply
from proa.server.errors import ApiError

_TYPE_BY_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_reply(error: ApiError, request_id: str) -> ErrorReply:
    """Convert an error to Anthropic's format, which has no `param` field: prefix the message with it."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return ErrorReply(ErrorDetails(_type_of(error), message), request_id)


def _type_of(error: ApiError) -> str:
    if error.code == "engine_dead":  # 503, but not overload: retrying does not help
        return "api_error"
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    return _TYPE_BY_STATUS.get(error.status, fallback)
