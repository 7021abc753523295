"""Typed messages over the engine's end of the socket. Never: torch, what messages do."""

from __future__ import annotations

import msgspec

from proa.engine.ipc import FromEngine, ToEngine
from proa.engine.processes.wire import SIZE_BYTES, EngineEnd
from proa.native.pool import Pool


class Channel:
    """Encodes and decodes messages over EngineEnd. Raises EOFError when the frontend has closed its end."""

    def __init__(self, end: EngineEnd) -> None:
        self._end = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._frame = bytearray()

    def send(self, message: FromEngine) -> None:
        self._encoder.encode_into(message, self._frame, SIZE_BYTES)
        self._end.send(self._frame)

    def send_by(self, pool: Pool) -> None:
        """See EngineEnd."""
        self._end.send_by(pool)

    def wait(self, timeout_ms: int) -> bool:
        return self._end.wait(timeout_ms)

    def receive(self) -> ToEngine:
        message: ToEngine = self._decoder.decode(self._end.receive())
        return message

    def close(self) -> None:
        self._end.close()
