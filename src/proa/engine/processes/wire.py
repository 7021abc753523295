"""Both ends of the socket between the frontend and its engine: one frame of bytes per message. Never: encodings.

The engine process inherits one end of a socketpair: no I/O thread between them, no name in the file system, no other
process can connect. When one process ends, the other reads end-of-file.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from proa.errors import NativeError
from proa.native.outbox import Outbox
from proa.native.pool import Pool

SIZE_BYTES = 4  # the frame's length in bytes, little-endian, before each frame


class Frames:
    """Splits a byte stream, added in pieces, into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data

    @property
    def has_next(self) -> bool:
        return len(self._data) >= SIZE_BYTES and len(self._data) >= self._end

    @property
    def _end(self) -> int:
        return SIZE_BYTES + int.from_bytes(self._data[:SIZE_BYTES], "little")

    def take(self) -> bytes:
        """Remove and return the next frame. Only if has_next."""
        end = self._end
        frame = bytes(self._data[SIZE_BYTES:end])
        del self._data[:end]
        return frame


class EngineEnd:
    """The engine's blocking end; one thread calls. Raises EOFError when the frontend has closed its end."""

    RECEIVE_BYTES = 1 << 16

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        end.set_inheritable(False)  # a child of the engine would keep it open
        self._socket = end
        self._outbox: Outbox | None = None
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send_by(self, pool: Pool) -> None:
        """Have idle workers of the pool write to the socket, so that send() returns before its frame is written. The
        calling thread must be the pool's caller."""
        self._outbox = Outbox(pool, self._socket.fileno())

    def send(self, frame: bytearray) -> None:
        """Send a frame. Its first SIZE_BYTES are overwritten with its size."""
        frame[:SIZE_BYTES] = (len(frame) - SIZE_BYTES).to_bytes(SIZE_BYTES, "little")
        try:
            if self._outbox is not None:
                self._outbox.write(bytes(frame))
            else:
                self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError, NativeError):
            raise EOFError("the frontend has closed its end of the socket") from None

    def wait(self, timeout_ms: int) -> bool:
        """Wait up to timeout_ms; returns whether receive() has anything to read: a frame, a part of one, or the end."""
        if timeout_ms:
            self._flush()
        return self._frames.has_next or bool(self._poll.poll(timeout_ms))

    def receive(self) -> bytes:
        """Block until a whole frame has arrived; return it."""
        while not self._frames.has_next:
            data = self._socket.recv(self.RECEIVE_BYTES)
            if not data:
                raise EOFError("the frontend has closed its end of the socket")
            self._frames.add(data)
        return self._frames.take()

    def close(self) -> None:
        """Wait until all frames are written, then close."""
        with suppress(EOFError):  # the frontend has closed its end: the frames are lost
            self._flush()
        self._outbox = None
        self._socket.close()

    def _flush(self) -> None:
        try:
            if self._outbox is not None:
                self._outbox.flush()
        except NativeError:
            raise EOFError("the frontend has closed its end of the socket") from None


class FrontendEnd(asyncio.Protocol):
    """The frontend's asyncio end. Calls `take` with each frame; set it before the engine's first message.

    takes_all: all frames that have arrived are taken in one iteration of the event loop. Otherwise one is, and tasks
    that it wakes run before the next.
    """

    def __init__(self) -> None:
        self.take: Callable[[bytes], None]
        self.takes_all = False
        self._frames = Frames()
        self._transport: asyncio.Transport
        self._busy = False

    def send(self, frame: bytes) -> None:
        """Queue a frame; never blocks. Does nothing once the connection is closing."""
        if not self._transport.is_closing():
            self._transport.writelines((len(frame).to_bytes(SIZE_BYTES, "little"), frame))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._frames.add(data)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = self._frames.has_next
        if not self._busy:
            return
        try:
            self.take(self._frames.take())
            while self.takes_all and self._frames.has_next:
                self.take(self._frames.take())
        except BaseException:
            self._transport.abort()  # the engine reads end-of-file and ends; the client sees its exit
            raise
        asyncio.get_running_loop().call_soon(self._next)
