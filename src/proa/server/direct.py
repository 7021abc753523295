"""ASGI middleware that calls the endpoints which generate text directly, past FastAPI's routing.

FastAPI matches the route, resolves dependencies and wraps every message of the response: 8 % of the server's time for a
short answer. The endpoints are FastAPI routes too, for requests that are not a POST to exactly their path.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from proa.errors import ProaError
from proa.server.dialect import error_response
from proa.server.errors import ApiError

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class DirectEndpoints:
    """Answers a POST to a path of `endpoints`; passes everything else on to `app`."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except (ApiError, ProaError) as error:
            await error_response(error, scope)(scope, receive, send)
