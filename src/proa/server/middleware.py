"""ASGI middleware of every request: request id, API key, metrics, a log line, unexpected errors."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa.obs.metrics import Outcome
from proa.obs.units import format_duration
from proa.server.access import Access
from proa.server.dialect import error_response
from proa.server.errors import ApiError, internal
from proa.server.service import RequestRecord, Service
from proa.server.sse import ClientGoneError

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
OPEN_PATHS = ("/health", "/metrics", "/version")  # without API key, for supervisors and Prometheus
_ID_HEADERS = (REQUEST_ID_HEADER.encode(), b"request-id")  # the second is read by Anthropic's clients
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_DISCONNECTED = "the client disconnected"


class RequestMiddleware:
    """Wraps every request. `paths`: the endpoint labels of the metrics; any other path is labelled "other"."""

    def __init__(self, app: ASGIApp, service: Service, access: Access, paths: Collection[str]) -> None:
        self._app = app
        self._service = service
        self._paths = frozenset(paths)
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["record"] = record
        status = 0

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = record.request_id.encode("latin-1")
                message["headers"] += ((name, request_id) for name in _ID_HEADERS)
            await send(message)

        self._service.in_flight += 1
        try:
            await self._guarded(scope, receive, named_send)
        except ClientGoneError:
            record.error = _DISCONNECTED
        except Exception:
            log.exception("Unexpected error in request %s", record.request_id)
            if status:
                raise  # the status line is already sent: close the connection instead
            await error_response(internal(record.request_id), scope)(scope, receive, named_send)
        finally:
            self._service.in_flight -= 1
            self._record(scope, record, status)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            try:
                self._access.check(Headers(scope=scope), is_counted=scope["method"] == "POST")
            except ApiError as refusal:
                await error_response(refusal, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _record(self, scope: Scope, record: RequestRecord, status: int) -> None:
        seconds = time.monotonic() - record.started_s
        endpoint = scope["path"] if scope["path"] in self._paths else "other"
        self._service.metrics.request(endpoint, _outcome(record, status), seconds)
        is_poll = scope["method"] in ("GET", "HEAD") and (status == 200 or scope["path"] == "/health")
        line = f"{scope['method']} {scope['path']}: {_in_words(record, status, seconds)}"
        log.log(logging.DEBUG if is_poll else logging.INFO, "%s", _printable(line))


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _SAFE_ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"


def _printable(text: str) -> str:
    """Escape control characters: client input must not break the log line or colour the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _outcome(record: RequestRecord, status: int) -> Outcome:
    if status == 0 or record.error == _DISCONNECTED:
        return "cancelled"
    if (status >= 500 and status != 501) or record.error:
        return "failed"
    return "refused" if status >= 400 else "ok"


def _in_words(record: RequestRecord, status: int, seconds: float) -> str:
    words = f"{status or 'no response'} after {format_duration(seconds)}"
    if record.prompt_tokens:
        experts = ""
        if record.streamed_tokens or record.cpu_tokens:
            experts = f", {record.streamed_tokens} streamed, {record.cpu_tokens} by the CPU"
        words += f", {record.prompt_tokens} prompt tokens ({record.cached_tokens} cached{experts})"
    if record.first_token_s is not None:
        decode_s = max(seconds - record.first_token_s, 1e-6)
        words += f", first token after {format_duration(record.first_token_s)}, {record.completion_tokens} tokens"
        if record.completion_tokens > 1:
            words += f" at {(record.completion_tokens - 1) / decode_s:.1f} tokens/s"
    if record.error:
        words += f"; {record.error}"
    return f"{words} [{record.request_id}]"
