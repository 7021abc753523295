"""Work that an event ends: cleanup comes first, and the task itself stays uncancelled."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from proa.server.interrupt import InterruptedWorkError, unless


def task() -> asyncio.Task[object]:
    found = asyncio.current_task()
    assert found is not None
    return found


def test_work_that_ends_first() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    async def run() -> None:
        event = asyncio.Event()
        assert await unless(event.wait, work()) == 7
        event.set()
        await asyncio.sleep(0.01)
        assert task().cancelling() == 0

    asyncio.run(run())


def test_an_error_of_the_work() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("bad")

    async def run() -> None:
        with pytest.raises(ValueError, match="bad"):
            await unless(asyncio.Event().wait, work())

    asyncio.run(run())


@pytest.mark.parametrize("swallows", [False, True])
def test_the_event_comes_first(swallows: bool) -> None:
    steps = []

    async def work() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            steps.append("cleaned up")
            if not swallows:
                raise
        return "done"

    async def run() -> None:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, event.set)
        if swallows:
            assert await unless(event.wait, work()) == "done"
        else:
            with pytest.raises(InterruptedWorkError):
                await unless(event.wait, work())
        assert steps == ["cleaned up"]
        assert task().cancelling() == 0
        await asyncio.sleep(0)  # is not cancelled

    asyncio.run(run())


def test_the_task_is_cancelled_meanwhile() -> None:
    async def outer(event: asyncio.Event) -> None:
        await unless(event.wait, asyncio.sleep(10))

    async def run(*, both: bool) -> None:
        event = asyncio.Event()
        running = asyncio.create_task(outer(event))
        await asyncio.sleep(0.01)
        if both:
            event.set()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    for both in (False, True):
        asyncio.run(run(both=both))


def test_the_event_and_the_end_in_one_iteration() -> None:
    """Whichever is first, nothing of the cancellation is left for what the task does next."""

    async def run() -> None:
        for order in range(2):
            event, end = asyncio.Event(), asyncio.Event()
            for one in (event, end) if order else (end, event):
                asyncio.get_running_loop().call_later(0.001, one.set)

            async def work(end: asyncio.Event = end) -> str:
                await end.wait()
                return "done"

            with contextlib.suppress(InterruptedWorkError):
                assert await unless(event.wait, work()) == "done"
            assert task().cancelling() == 0
            await asyncio.sleep(0.01)

    asyncio.run(run())
