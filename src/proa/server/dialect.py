"""Error format and stream framing of each API, OpenAI's or Anthropic's, chosen by the request's path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from proa.server.anthropic_errors import error_reply
from proa.server.errors import ApiError, json_response
from proa.server.service import RequestRecord
from proa.server.sse import NAMED_FRAMES, PLAIN_FRAMES, Frames

_ANTHROPIC_PATH = "/v1/messages"


@dataclass(frozen=True)
class Dialect:
    """One API's conventions. error_body: (error, request id) -> body of an error response."""

    error_body: Callable[[ApiError, str], Any]
    frames: Frames


OPENAI = Dialect(lambda error, _: error.body(), PLAIN_FRAMES)
ANTHROPIC = Dialect(error_reply, NAMED_FRAMES)


def dialect_of(path: str) -> Dialect:
    return ANTHROPIC if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/") else OPENAI


def error_response(error: ApiError, scope: Scope) -> Response:
    """Build the HTTP error response in the format of the request path's API."""
    record: RequestRecord = scope["state"]["record"]
    body = dialect_of(scope["path"]).error_body(error, record.request_id)
    return json_response(body, error.status, error.headers)
