"""Whose protocol an answer is written in, by the path of the request: its errors and the frames of its streams.
Never: what is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from proa.server.anthropic_errors import error_reply
from proa.server.errors import ApiError, json_response
from proa.server.service import Tally
from proa.server.sse import NAMED_FRAMES, PLAIN_FRAMES, Frames

_ANTHROPIC_PATH = "/v1/messages"


@dataclass(frozen=True)
class Dialect:
    """`error_body` takes the error and the request's id."""

    error_body: Callable[[ApiError, str], Any]
    frames: Frames


OPENAI = Dialect(lambda error, _: error.body(), PLAIN_FRAMES)
ANTHROPIC = Dialect(error_reply, NAMED_FRAMES)


def dialect_of(path: str) -> Dialect:
    return ANTHROPIC if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/") else OPENAI


def error_response(error: ApiError, scope: Scope) -> Response:
    """The answer to a request that is refused, in the protocol of its path."""
    tally: Tally = scope["state"]["tally"]
    body = dialect_of(scope["path"]).error_body(error, tally.request_id)
    return json_response(body, error.status, error.headers)
