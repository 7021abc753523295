"""Parses, validates and tokenises large request bodies in another process, so that other requests go on.

Parsing 30 MiB of JSON holds Python's interpreter lock for hundreds of milliseconds. The process answers with the
request's error, or with the body reduced to the fields that are used, which cannot be much longer than the context.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence

import msgspec

from proa.config.env import child_environ
from proa.llm import TextSource
from proa.server.errors import ApiError

log = logging.getLogger(__name__)

LARGE_BYTES = 512 * 1024  # smaller bodies take some 10 ms
KEPT_BYTES = 4 << 20  # the process is ended after a larger body: Python keeps some 90 bytes for each byte parsed
SIZE_BYTES = 8  # before each message and each body, little-endian


class Check(msgspec.Struct, frozen=True):
    """Asks for a check of the body that follows. schema: the name of the request's class."""

    schema: str
    strict: bool
    body_bytes: int


class Wrong(msgspec.Struct, frozen=True, tag=True):
    """The fields of an ApiError."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = {}


class Right(msgspec.Struct, frozen=True, tag=True):
    body: bytes


Outcome = Wrong | Right


class Precheck:
    """The process that checks large bodies, one at a time. The first one starts it. It is ended when no body waits, if
    one was larger than KEPT_BYTES."""

    def __init__(self, source: TextSource) -> None:
        self._source = source
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._asked, self._most_bytes = 0, 0  # exchanges under way or waiting; the largest body of this process

    async def reduced(self, parts: Sequence[bytes], schema: str, *, strict: bool) -> bytes:
        """Return the body, given in parts, with the fields that are used. Raises ApiError."""
        # A client that disconnects must not end an exchange in the middle: the next one would read its answer.
        outcome = await asyncio.shield(self._in_turn(parts, Check(schema, strict, sum(map(len, parts)))))
        if isinstance(outcome, Wrong):
            raise ApiError(outcome.status, outcome.code, outcome.message, param=outcome.param, headers=outcome.headers)
        return outcome.body

    async def _in_turn(self, parts: Sequence[bytes], check: Check) -> Outcome:
        self._asked += 1
        try:
            async with self._turn:
                self._most_bytes = max(self._most_bytes, check.body_bytes)
                return await self._exchange(parts, check)
        finally:
            self._asked -= 1
            if not self._asked and self._most_bytes > KEPT_BYTES and (process := self._process) is not None:
                self.close()
                await process.wait()

    async def _exchange(self, parts: Sequence[bytes], check: Check) -> Outcome:
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018 - pipes, by construction
        try:
            for data in (_framed(msgspec.msgpack.encode(check)), *parts):
                process.stdin.write(data)
                await process.stdin.drain()
            size = int.from_bytes(await process.stdout.readexactly(SIZE_BYTES), "little")
            outcome: Outcome = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Outcome)
            return outcome
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            log.error("The process that checks large requests has ended; the next one starts it again.")
            self.close()
            raise ApiError(500, "internal_error", "The request could not be checked. Send it again.") from error

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proa.server.precheck_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=child_environ(),
            )
            assert self._process.stdin is not None  # a pipe, by construction
            self._process.stdin.write(_framed(msgspec.msgpack.encode(self._source)))
        return self._process

    def close(self) -> None:
        """Kill the process, even in the middle of a check."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process, self._most_bytes = None, 0


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(SIZE_BYTES, "little") + message
