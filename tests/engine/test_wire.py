"""Frames over the socket between frontend and engine: cut anywhere, large, and when one side is gone."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from proa.engine.processes.wire import SIZE_BYTES, EngineEnd, Frames, FrontendEnd
from proa.native.outbox import Outbox
from proa.native.pool import Pool

MESSAGES = [b"", b"a", b"bc" * 300, b"\0\0\0\1", b"last"]
LARGE = bytes(range(256)) * 20_000  # more than any socket buffers


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(SIZE_BYTES, "little") + message


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 64, 10_000])
def test_frames_come_whole_however_the_stream_is_cut(piece_bytes: int) -> None:
    stream, frames, seen = b"".join(map(framed, MESSAGES)), Frames(), []
    for at in range(0, len(stream), piece_bytes):
        frames.add(stream[at : at + piece_bytes])
        while frames.has_next:
            seen.append(frames.take())
    assert seen == MESSAGES


def test_the_engines_end_blocks_and_raises_at_end_of_file() -> None:
    mine, its = socket.socketpair()
    engine = EngineEnd(its)
    assert not its.get_inheritable()
    assert not engine.wait(0)
    mine.sendall(framed(b"one") + framed(b"two") + framed(b"three")[:5])
    assert engine.wait(0)
    assert engine.receive() == b"one"
    assert engine.wait(0), "the second frame arrived with the first"
    assert engine.receive() == b"two"
    mine.sendall(framed(b"three")[5:])
    assert engine.receive() == b"three"
    assert not engine.wait(0)
    engine.send(bytearray(SIZE_BYTES) + b"answer")
    assert mine.recv(100) == framed(b"answer")
    mine.close()
    assert engine.wait(0)
    with pytest.raises(EOFError):
        engine.receive()
    with pytest.raises(EOFError):
        engine.send(bytearray(SIZE_BYTES))
    engine.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_idle_workers_send_frames(workers: int) -> None:
    mine, its = socket.socketpair()
    with Pool([[0] * workers], pin=False) as pool:
        engine = EngineEnd(its)
        engine.send_by(pool)
        for message in MESSAGES:
            engine.send(bytearray(SIZE_BYTES) + message)
        reader = threading.Thread(target=mine.sendall, args=(framed(b"answer"),))
        reader.start()
        assert engine.wait(10_000), "wait() sends pending frames first"
        sent = b"".join(map(framed, MESSAGES))
        assert mine.recv(len(sent), socket.MSG_WAITALL) == sent
        reader.join()
        mine.close()
        with suppress(EOFError):
            engine.send(bytearray(SIZE_BYTES) + b"lost: only the sending worker gets the error")
        with pytest.raises(EOFError):
            engine.send(bytearray(SIZE_BYTES) + b"raises the error of the frame before")
        engine.close()


def test_close_sends_pending_frames() -> None:
    mine, its = socket.socketpair()
    with mine, Pool([[0]], pin=False) as pool:
        engine = EngineEnd(its)
        engine.send_by(pool)
        engine.send(bytearray(SIZE_BYTES) + b"last")
        engine.close()
        assert mine.recv(len(framed(b"last")), socket.MSG_WAITALL) == framed(b"last")


def test_a_pool_has_one_outbox() -> None:
    mine, its = socket.socketpair()
    with mine, Pool([[0]], pin=False) as pool:
        for _ in range(2):
            first = Outbox(pool, its.fileno())
            with pytest.raises(ValueError, match="an outbox already"):
                Outbox(pool, its.fileno())
            del first
    its.close()


def with_frontend(go: Callable[[FrontendEnd, EngineEnd], Awaitable[None]]) -> None:
    async def run() -> None:
        mine, its = socket.socketpair()
        _, frontend = await asyncio.get_running_loop().create_unix_connection(FrontendEnd, sock=mine)
        engine = EngineEnd(its)
        try:
            await go(frontend, engine)
        finally:
            engine.close()
            frontend.close()
            await asyncio.sleep(0)

    asyncio.run(run())


def test_large_frames_both_ways_at_once() -> None:
    """The frontend sends without waiting for the engine, whose blocking send needs the frontend to read."""

    async def go(frontend: FrontendEnd, engine: EngineEnd) -> None:
        seen: asyncio.Queue[bytes] = asyncio.Queue()
        frontend.take = seen.put_nowait
        received = []

        def answer() -> None:
            engine.send(bytearray(SIZE_BYTES) + LARGE)
            received.extend(engine.receive() for _ in range(2))

        thread = threading.Thread(target=answer)
        thread.start()
        frontend.send(LARGE)
        frontend.send(b"small")
        assert await seen.get() == LARGE
        await asyncio.to_thread(thread.join)
        assert received == [LARGE, b"small"]

    with_frontend(go)


def test_tasks_woken_by_a_frame_run_before_the_next() -> None:
    async def go(frontend: FrontendEnd, engine: EngineEnd) -> None:
        order: list[str] = []

        def take(frame: bytes) -> None:
            order.append(f"took {frame.decode()}")
            asyncio.get_running_loop().call_soon(order.append, f"used {frame.decode()}")

        frontend.take = take
        for name in (b"1", b"2", b"3"):
            engine.send(bytearray(SIZE_BYTES) + name)
        while len(order) < 6:
            await asyncio.sleep(0.001)
        assert order == ["took 1", "used 1", "took 2", "used 2", "took 3", "used 3"]

    with_frontend(go)


def test_sending_to_an_ended_engine_does_nothing() -> None:
    async def go(frontend: FrontendEnd, engine: EngineEnd) -> None:
        engine.close()
        for _ in range(20):
            frontend.send(LARGE)
            await asyncio.sleep(0)

    with_frontend(go)


def test_an_error_in_take_closes_the_connection() -> None:
    async def go(frontend: FrontendEnd, engine: EngineEnd) -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))

        def fail(frame: bytes) -> None:
            raise ValueError(frame)

        frontend.take = fail
        engine.send(bytearray(SIZE_BYTES) + b"nonsense")
        while not errors:
            await asyncio.sleep(0.001)
        assert [type(error) for error in errors] == [ValueError]
        with pytest.raises(EOFError):
            await asyncio.to_thread(engine.receive)

    with_frontend(go)
