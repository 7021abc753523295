"""Error format and stream framing of each API, chosen by the request's path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from proa.errors import ProaError
from proa.server.anthropic_errors import error_reply
from proa.server.errors import ApiError, from_proa, json_response
from proa.server.service import RequestRecord
from proa.server.sse import LINE_FRAMES, NAMED_FRAMES, PLAIN_FRAMES, TYPED_FRAMES, Frames


@dataclass(frozen=True)
class Dialect:
    """One API's conventions. error_body: (error, request id) -> body of an error response, and the event that ends a
    failed stream, unless its job makes that (Job.failure)."""

    error_body: Callable[[ApiError, str], Any]
    frames: Frames


def _openai_error(error: ApiError, request_id: str) -> Any:
    return error.body()


def _ollama_error(error: ApiError, request_id: str) -> Any:
    return {"error": error.message}


OPENAI = Dialect(_openai_error, PLAIN_FRAMES)
RESPONSES = Dialect(_openai_error, TYPED_FRAMES)
OLLAMA = Dialect(_ollama_error, LINE_FRAMES)
ANTHROPIC = Dialect(error_reply, NAMED_FRAMES)
_BY_PATH = {"/api": OLLAMA, "/v1/messages": ANTHROPIC, "/v1/responses": RESPONSES}


def dialect_of(path: str) -> Dialect:
    return next((d for start, d in _BY_PATH.items() if path == start or path.startswith(f"{start}/")), OPENAI)


def error_response(error: ApiError | ProaError, scope: Scope) -> Response:
    """Build the HTTP error response in the format of the request path's API."""
    if isinstance(error, ProaError):
        error = from_proa(error)
    record: RequestRecord = scope["state"]["record"]
    body = dialect_of(scope["path"]).error_body(error, record.request_id)
    return json_response(body, error.status, error.headers)
