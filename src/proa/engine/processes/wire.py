"""Both ends of the socket between the frontend and its engine: frames of bytes, one a message. Never: what they mean.

A pair of sockets that the child inherits, and nothing in between: no thread to wake, no name in the file system, nobody
else who could connect. When either process is gone the other's end says so.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress

from proa.errors import NativeError
from proa.native.outbox import Outbox
from proa.native.pool import Pool

SIZE_BYTES = 4  # in front of each frame: how long it is, little-endian


class Frames:
    """Pieces of a stream in, whole frames out."""

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
        """The next one, if has_next."""
        end = self._end
        frame = bytes(self._data[SIZE_BYTES:end])
        del self._data[:end]
        return frame


class EngineEnd:
    """The engine's: one thread, which waits. Raises EOFError when the frontend is gone."""

    RECEIVE_BYTES = 1 << 16

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        end.set_inheritable(False)  # or a grandchild would keep it open
        self._socket = end
        self._outbox: Outbox | None = None
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send_by(self, pool: Pool) -> None:
        """From now on idle workers of the pool do the sending, while its caller, whose end this is, goes on."""
        self._outbox = Outbox(pool, self._socket.fileno())

    def send(self, frame: bytearray) -> None:
        """The first SIZE_BYTES of `frame` are room for its size."""
        frame[:SIZE_BYTES] = (len(frame) - SIZE_BYTES).to_bytes(SIZE_BYTES, "little")
        try:
            if self._outbox is not None:
                self._outbox.write(bytes(frame))
            else:
                self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError, NativeError):
            raise EOFError("the frontend is gone") from None

    def wait(self, timeout_ms: int) -> bool:
        """Whether something has come, a frame at least in part, or the end."""
        if timeout_ms:
            self._flush()
        return self._frames.has_next or bool(self._poll.poll(timeout_ms))

    def receive(self) -> bytes:
        """The next frame, waited for."""
        while not self._frames.has_next:
            data = self._socket.recv(self.RECEIVE_BYTES)
            if not data:
                raise EOFError("the frontend is gone")
            self._frames.add(data)
        return self._frames.take()

    def close(self) -> None:
        """What was sent still arrives."""
        with suppress(EOFError):  # nobody is left whom it would reach
            self._flush()
        self._outbox = None
        self._socket.close()

    def _flush(self) -> None:
        try:
            if self._outbox is not None:
                self._outbox.flush()
        except NativeError:
            raise EOFError("the frontend is gone") from None


class FrontendEnd(asyncio.Protocol):
    """The frontend's: gives each frame to `take`, which must be set before the engine has reason to speak."""

    def __init__(self) -> None:
        self.take: Callable[[bytes], None]
        self._frames = Frames()
        self._transport: asyncio.Transport
        self._busy = False

    def send(self, frame: bytes) -> None:
        """Never waits, not even for an engine that has died."""
        if not self._transport.is_closing():
            self._transport.writelines((len(frame).to_bytes(SIZE_BYTES, "little"), frame))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

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
        except BaseException:
            self._transport.abort()  # the engine ends, and that is noticed
            raise
        # Who waits for this frame's news comes before the next frame.
        asyncio.get_running_loop().call_soon(self._next)
