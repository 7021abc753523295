"""Writes of one iteration of the event loop go out together, in order, also before the connection closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proa.server.gathered_writes import GatheringTransport


class Recorder(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes | str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


def recorded(act: Callable[[GatheringTransport], None]) -> list[bytes | str]:
    """Call `act` in one iteration; return the calls that reached the transport after a few more."""

    async def run() -> list[bytes | str]:
        recorder = Recorder()
        act(GatheringTransport(recorder))
        for _ in range(3):
            await asyncio.sleep(0)
        return recorder.calls

    return asyncio.run(run())


def test_writes_of_an_iteration_are_one() -> None:
    def act(transport: GatheringTransport) -> None:
        for piece in (b"head", b"event", b"end"):
            transport.write(piece)

    assert recorded(act) == [b"headeventend"]


def test_writes_of_several_iterations_stay_apart() -> None:
    async def run() -> list[bytes | str]:
        recorder = Recorder()
        transport = GatheringTransport(recorder)
        for piece in (b"a", b"b"):
            transport.write(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return recorder.calls

    assert asyncio.run(run()) == [b"a", b"b"]


def test_close_sends_first() -> None:
    def act(transport: GatheringTransport) -> None:
        transport.write(b"late")
        transport.close()

    assert recorded(act) == [b"late", "close"]


def test_abort_sends_nothing() -> None:
    def act(transport: GatheringTransport) -> None:
        transport.write(b"lost")
        transport.abort()

    assert recorded(act) == ["abort"]
