"""Server-sent event streams, and the detection of client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from proa.server.interrupt import InterruptedWorkError, unless

FIRST_OBJECT_S = 2.0  # the status line waits this long for the first object, so that an early refusal has its own code
KEEP_ALIVE_S = 10.0  # after this long without an event a keep-alive is sent, so that proxies do not time out

_NO_BUFFERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_LINE_ENDS = [(char.encode(), rb"\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has disconnected: the response cannot be delivered."""


def line(content: object) -> bytes:
    """Encode as JSON without the characters at which Python's splitlines, and with it httpx's iter_lines, ends a line
    though neither JSON nor server-sent events do."""
    text = msgspec.json.encode(content)
    if not text.isascii():
        for raw, escaped in _LINE_ENDS:
            text = text.replace(raw, escaped)
    return text


def event(content: object) -> bytes:
    return b"data: " + line(content) + b"\n\n"


def named_event(content: msgspec.Struct) -> bytes:
    """Encode an event whose name is the struct's tag; the tag is in its data too."""
    return f"event: {content.__struct_config__.tag}\n".encode() + event(content)


@dataclass(frozen=True)
class Frames:
    """One protocol's framing: the encoder of an event, the keep-alive bytes, the bytes that end the stream, the media
    type."""

    event: Callable[[Any], bytes]
    keep_alive: bytes
    end: bytes
    media_type: str = "text/event-stream; charset=utf-8"


PLAIN_FRAMES = Frames(event, keep_alive=b": working\n\n", end=b"data: [DONE]\n\n")
TYPED_FRAMES = Frames(
    lambda content: f"event: {content['type']}\n".encode() + event(content), keep_alive=b": working\n\n", end=b""
)
LINE_FRAMES = Frames(lambda content: line(content) + b"\n", keep_alive=b"", end=b"", media_type="application/x-ndjson")
NAMED_FRAMES = Frames(named_event, keep_alive=b'event: ping\ndata: {"type":"ping"}\n\n', end=b"")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; if the client disconnects first, cancel it, wait for its cleanup, and raise ClientGoneError.

    The request's body must have been read: after that, `receive` returns only the disconnect.
    """
    try:
        return await unless(partial(_disconnected, receive), work)
    except InterruptedWorkError:
        raise ClientGoneError from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WhileConnected(Response):
    """A response that `answer` builds and sends. If the client disconnects, `answer` is cancelled and ClientGoneError
    raised. An error that `answer` raises before it has sent anything becomes an error response."""

    def __init__(self, answer: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
        self.status_code, self.background, self.raw_headers = 200, None, []
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._answer(send))


async def send_events(
    objects: AsyncGenerator[Any, None],
    frames: Frames,
    explain: Callable[[Exception], object],
    headers: Mapping[str, str],
    send: Send,
) -> None:
    """Send `objects`, encoded by `frames`, until they end; then close the generator. The head is sent with the first
    object, but after FIRST_OBJECT_S at the latest. An error before the head is raised; a later one is sent as the event
    that `explain` returns for it."""
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    head = {
        "type": "http.response.start",
        "status": 200,
        "headers": [*_NO_BUFFERS, *raw, (b"content-type", frames.media_type.encode())],
    }
    body = _Body(send, head, frames.keep_alive)
    try:
        async for item in objects:
            await body.send(frames.event(item))
        await body.begin()
    except Exception as error:
        if not body.has_begun:
            raise
        await body.send(frames.event(explain(error)))
    finally:
        await body.end()
        await objects.aclose()
    await send({"type": "http.response.body", "body": frames.end, "more_body": False})


class _Body:
    """Sends the parts of a response body, one after another. The head is sent before the first part or after
    FIRST_OBJECT_S; the keep-alive bytes whenever no part was sent for KEEP_ALIVE_S, but at most one keep-alive waits
    for a client that has stopped reading."""

    def __init__(self, send: Send, head: Message, keep_alive: bytes) -> None:
        self._send_message, self._keep_alive = send, keep_alive
        self._head: Message | None = head  # None once it is being sent
        self._sending = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._last_s = time.monotonic()
        self._schedule(FIRST_OBJECT_S)

    @property
    def has_begun(self) -> bool:
        return self._head is None

    async def begin(self) -> None:
        """Send the head if it has not been sent yet."""
        async with self._sending:
            await self._send_head()

    async def send(self, data: bytes) -> None:
        async with self._sending:
            await self._send_head()
            self._last_s = time.monotonic()
            await self._send_message({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_head(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._last_s = time.monotonic()
            await self._send_message(head)

    async def end(self) -> None:
        """Stop; wait for a keep-alive that is being sent."""
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    def _schedule(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._beat)

    def _beat(self) -> None:
        left_s = self._last_s + KEEP_ALIVE_S - time.monotonic() if self.has_begun else 0.0
        if left_s <= 0 and (self._beating is None or self._beating.done()):
            self._beating = asyncio.create_task(self.send(self._keep_alive) if self.has_begun else self.begin())
        self._schedule(left_s if left_s > 0 else KEEP_ALIVE_S)
