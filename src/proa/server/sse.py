"""Server-sent event streams, and the detection of client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from proa.server.interrupt import InterruptedWorkError, unless

FIRST_OBJECT_S = 2.0  # the status line waits this long for the first object, so that an early refusal has its own code
KEEP_ALIVE_S = 10.0  # after this long without an event a keep-alive is sent, so that proxies do not time out

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has disconnected: the response cannot be delivered."""


def event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


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
    media_type: str = "text/event-stream"


PLAIN_FRAMES = Frames(event, keep_alive=b": working\n\n", end=b"data: [DONE]\n\n")
TYPED_FRAMES = Frames(
    lambda content: f"event: {content['type']}\n".encode() + event(content), keep_alive=b": working\n\n", end=b""
)
LINE_FRAMES = Frames(
    lambda content: msgspec.json.encode(content) + b"\n", keep_alive=b"", end=b"", media_type="application/x-ndjson"
)
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


class PrefetchedStream(Generic[T]):
    """An async generator whose first item is already being produced. `aclose` closes it, read or not."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._first: asyncio.Future[T] | None = asyncio.ensure_future(anext(items))

    @classmethod
    async def open(cls, items: AsyncGenerator[T, None]) -> PrefetchedStream[T]:
        """Wait for the first item, at most FIRST_OBJECT_S. Raises the generator's error if it fails before that."""
        opened = cls(items)
        try:
            await opened._wait_first()
        except BaseException:
            await opened.aclose()
            raise
        return opened

    async def _wait_first(self) -> None:
        if self._first is not None:
            await asyncio.wait((self._first,), timeout=FIRST_OBJECT_S)
            if self._first.done():
                self._first.result()

    def __aiter__(self) -> PrefetchedStream[T]:
        return self

    async def __anext__(self) -> T:
        if self._first is None:
            return await anext(self._items)
        item = await self._first
        self._first = None
        return item

    async def aclose(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._items.aclose()


class EventStream(Response):
    """Sends `objects` framed by `frames` until they end or the client disconnects; closes them in both cases.

    `explain` converts an error in mid-stream to the error object that is sent to the client.
    """

    def __init__(
        self,
        objects: PrefetchedStream[Any],
        frames: Frames,
        explain: Callable[[Exception], object],
        headers: dict[str, str],
    ) -> None:
        no_buffers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**no_buffers, **headers}, media_type=frames.media_type)
        del self.headers["content-length"]
        self._objects = objects
        self._frames = frames
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        finally:
            await self._objects.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        heartbeat = _Heartbeat(send, self._frames.keep_alive)
        try:
            async for item in self._objects:
                await heartbeat.send(self._frames.event(item))
        except Exception as error:  # noqa: BLE001 - the status line is sent: report the error as an event
            await heartbeat.send(self._frames.event(self._explain(error)))
        finally:
            await heartbeat.end()
        await send({"type": "http.response.body", "body": self._frames.end, "more_body": False})


class _Heartbeat:
    """Sends parts of a body, and the keep-alive bytes whenever none was sent for KEEP_ALIVE_S: one keep-alive at a
    time, however long its reader stalls."""

    def __init__(self, send: Send, keep_alive: bytes) -> None:
        self._send_message, self._keep_alive = send, keep_alive
        self._beating: asyncio.Task[None] | None = None
        self._last_s = time.monotonic()
        self._schedule(KEEP_ALIVE_S)

    async def send(self, data: bytes) -> None:
        self._last_s = time.monotonic()
        await self._send_message({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Stop; wait for a keep-alive that is being sent."""
        self._timer.cancel()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    def _schedule(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._beat)

    def _beat(self) -> None:
        left_s = self._last_s + KEEP_ALIVE_S - time.monotonic()
        if left_s <= 0 and (self._beating is None or self._beating.done()):
            self._beating = asyncio.create_task(self.send(self._keep_alive))
        self._schedule(left_s if left_s > 0 else KEEP_ALIVE_S)
