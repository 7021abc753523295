"""Ctrl-C while work is submitted to the event loop of `LLM`, whose thread may be faster than the one that submits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from proa.blocking import _LoopThread

WAIT_S = 10.0
submit = asyncio.run_coroutine_threadsafe


@pytest.fixture
def loop() -> Iterator[_LoopThread]:
    made = _LoopThread()
    yield made
    made.stop()


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have the next submission be interrupted when its work is on the loop and `when` has returned."""

    def use(when: Callable[[], object]) -> None:
        def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
            submit(work, loop)
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit)
            when()
            raise KeyboardInterrupt

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)

    return use


@pytest.mark.parametrize("begun_first", [True, False])
def test_an_interrupt_right_after_submitting_cancels(
    loop: _LoopThread, interrupt: Callable[[Callable[[], object]], None], begun_first: bool
) -> None:
    begun, ended, gate = threading.Event(), threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    if begun_first:
        interrupt(lambda: begun.wait(WAIT_S))
    else:
        loop._loop.call_soon_threadsafe(gate.wait, WAIT_S)
        interrupt(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    gate.set()
    if begun_first:
        assert ended.wait(WAIT_S)
    loop.run(asyncio.sleep(0))
    assert begun.is_set() == begun_first


def test_an_interrupt_while_another_thread_stops_the_loop(interrupt: Callable[[Callable[[], object]], None]) -> None:
    loop = _LoopThread()
    interrupt(loop.stop)
    with pytest.raises(KeyboardInterrupt):
        loop.run(asyncio.sleep(60))
