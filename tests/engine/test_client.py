"""EngineClient's handling of the engine's messages, without an engine."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from proa.engine.ipc import Submit, Tokens
from proa.engine.processes.channel import Channel
from proa.engine.processes.client import EngineClient
from proa.engine.processes.wire import EngineEnd, FrontendEnd
from proa.engine.stats import SchedulerStats, Stats
from proa.types import EngineRequest, Sampling, TokenEvent

STEPS = 20


class Process:
    returncode = 0

    def close_stdin(self) -> None: ...

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


def taken(joins: bool) -> list[tuple[list[int], int]]:
    """Send STEPS steps of one request at once; return each event's tokens with the stats' number of steps."""
    messages: list[Any] = [
        Tokens(
            [TokenEvent(id="r", tokens=[step], finish="length" if step == STEPS else None)],
            Stats(SchedulerStats(steps=step)),
        )
        for step in range(1, STEPS + 1)
    ]

    async def go() -> list[tuple[list[int], int]]:
        mine, its = socket.socketpair()
        _, end = await asyncio.get_running_loop().create_unix_connection(FrontendEnd, sock=mine)
        client = EngineClient(Process(), end, joins=joins)  # type: ignore[arg-type]
        engine = Channel(EngineEnd(its))
        for message in messages:
            engine.send(message)  # all have arrived when the first is taken
        request = EngineRequest(id="r", tokens=[1], sampling=Sampling(max_tokens=STEPS))
        seen = [(event.tokens, client.stats.scheduler.steps) async for event in client.generate(request)]
        asked = engine.receive()
        assert isinstance(asked, Submit)
        assert asked.request == request
        await client.close()
        engine.close()
        return seen

    return asyncio.run(go())


def test_events_come_with_their_steps_stats() -> None:
    assert taken(joins=False) == [([step], step) for step in range(1, STEPS + 1)]


def test_a_frontend_that_is_behind_gets_the_steps_in_one_event() -> None:
    assert taken(joins=True) == [(list(range(1, STEPS + 1)), STEPS)]
