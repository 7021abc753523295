"""The HTTP server's connections: how many may be open, and how long one may take to send its request.

A client that sends nothing, or a byte now and then, holds a file descriptor. The rules here bound that: a request's
head must arrive within HEAD_S; its body may take BODY_GRACE_S, and must then advance by BODY_BYTES_PER_S; at the limit
of open connections, the one that has been without a request for longest is closed for the new one
(docs/decisions/049-server-that-cannot-be-stalled.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from proa.server.gathered_writes import GatheringTransport

log = logging.getLogger(__name__)

HEAD_S = 20.0  # from the connection, or the first byte on a kept connection, to the end of a request's head
BODY_GRACE_S = 20.0  # from the head; after that every window of a body must bring its bytes
BODY_WINDOW_S = 5.0
BODY_BYTES_PER_S = 1024
RESERVED_DESCRIPTORS = 128  # for the engine's pipes, files, log, accepted sockets that are about to be closed
MAX_CONNECTIONS = 10_000  # each takes some 20 KB
ACCEPT_BATCH = 16  # accepted per iteration of the event loop, so that open requests advance in between


def _closing_answer(status: str, text: str, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\n{more}connection: close\r\ncontent-length: {len(text)}"
    return f"{head}\r\n\r\n{text}".encode()


_LATE = _closing_answer("408 Request Timeout", "The request arrived too slowly.")
_BUSY = _closing_answer("503 Service Unavailable", "All connections are in use; retry later.", "retry-after: 5\r\n")


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of file descriptors to the hard limit; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # refused by a sandbox: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS + RESERVED_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit


class OpenConnections:
    """All open connections of a server. `waiting`: those without a request, longest first."""

    def __init__(self, descriptors: int) -> None:
        self.most = min(MAX_CONNECTIONS, max(8, descriptors - RESERVED_DESCRIPTORS))
        self.all: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}

    def make_room(self) -> bool:
        """Close the connection that has waited longest if the limit is reached; False if there is none to close."""
        if len(self.all) < self.most:
            return True
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return False
        log.warning("Closed idle connections: the limit of %d is reached.", self.most)
        oldest.drop()
        return True


class Connection(H11Protocol):
    """One client connection, with deadlines for its requests. h11's state says what the client owes next."""

    def __init__(self, config: uvicorn.Config, state: Any, opened: OpenConnections) -> None:
        super().__init__(config, state, {})
        self._opened = opened
        self._deadline: asyncio.TimerHandle | None = None
        self._owes: type[h11.IDLE] | type[h11.SEND_BODY] | None = None  # what the deadline is for
        self._window_bytes = 0  # of the body, in this window
        self._was_paused = False  # the server itself had stopped reading when the window began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self._opened.make_room():
            log.warning("Refused connections with 503: all %d are in use.", self._opened.most)
            transport.write(_BUSY)
            transport.close()
            self.transport = transport
            return
        self._opened.all.add(self)
        self._opened.waiting[self] = None
        super().connection_made(GatheringTransport(transport))
        self._expect(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused, or dropped
            return
        self._window_bytes += len(data)
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def drop(self) -> None:
        """Close at once, without an answer."""
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._opened.all.discard(self)
        self._opened.waiting.pop(self, None)

    def _follow(self) -> None:
        """Set the deadline for what the client has to send next; between requests uvicorn's keep-alive timer runs."""
        theirs = self.conn.their_state
        if theirs is not h11.IDLE or self.conn.our_state is not h11.IDLE:
            self._opened.waiting.pop(self, None)
        elif self in self._opened.all:
            self._opened.waiting.setdefault(self)
        if theirs is h11.SEND_BODY:
            self._expect(h11.SEND_BODY)
        elif theirs is not h11.IDLE:
            self._expect(None)
        elif self.conn.trailing_data[0]:  # a head has begun
            self._expect(h11.IDLE)
        elif self.cycle is not None:
            self._expect(None)

    def _expect(self, owed: Any) -> None:
        if owed is not self._owes:
            self._owes = owed
            self._set_deadline(
                None if owed is None else (HEAD_S, self._head_is_late) if owed is h11.IDLE
                else (BODY_GRACE_S, self._begin_window)
            )  # fmt: skip

    def _set_deadline(self, deadline: tuple[float, Callable[[], None]] | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if deadline is None else self.loop.call_later(*deadline)

    def _head_is_late(self) -> None:
        self._refuse_late("head")

    def _begin_window(self) -> None:
        self._window_bytes = 0
        self._was_paused = self.flow.read_paused
        self._set_deadline((BODY_WINDOW_S, self._end_window))

    def _end_window(self) -> None:
        """Refuse a body that brought too little in this window, unless the server itself had stopped reading."""
        is_paused = self._was_paused or self.flow.read_paused
        if is_paused or self._window_bytes >= BODY_WINDOW_S * BODY_BYTES_PER_S:
            self._begin_window()
        else:
            self._refuse_late("body")

    def _refuse_late(self, part: str) -> None:
        log.info("Closed connections whose request's %s arrived too slowly.", part)
        self._forget()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(_LATE)
        self.transport.close()
