"""The frontend's end of the engine's messages, without an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from proa.engine.client import EngineClient
from proa.engine.ipc import FromEngine, Stats, Tokens
from proa.types import EngineRequest, Sampling, TokenEvent

STEPS = 20


class Backlog:
    """A socket whose messages have all come already."""

    def __init__(self, messages: list[FromEngine]) -> None:
        self._waiting = [msgspec.msgpack.encode(message) for message in messages]
        self._asked = asyncio.Event()

    async def send(self, message: bytes) -> None:
        self._asked.set()

    async def recv(self) -> bytes:
        await self._asked.wait()
        if not self._waiting:
            await asyncio.Event().wait()
        return self._waiting.pop(0)

    def close(self) -> None:
        pass


class Process:
    returncode, stdin = 0, None

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


def test_events_are_seen_with_the_stats_of_their_step(tmp_path: Path) -> None:
    messages: list[Any] = [
        Tokens([TokenEvent(id="r", tokens=[step], finish="length" if step == STEPS else None)], Stats(steps=step))
        for step in range(1, STEPS + 1)
    ]

    async def go() -> list[tuple[int, int]]:
        client = EngineClient(Process(), Backlog(messages), tmp_path / "gone")  # type: ignore[arg-type]
        request = EngineRequest(id="r", tokens=[1], sampling=Sampling(max_tokens=STEPS))
        seen = [(event.tokens[0], client.stats.steps) async for event in client.generate(request)]
        await client.close()
        return seen

    assert asyncio.run(go()) == [(step, step) for step in range(1, STEPS + 1)]
