"""Cancels the work of a request when an event happens: the client disconnects, or the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class InterruptedWorkError(Exception):
    """The event came before the work was done; the work has been cancelled and has cleaned up."""


async def unless(event: Callable[[], Coroutine[Any, Any, object]], work: Coroutine[Any, Any, T]) -> T:
    """Await `work` in the calling task, and cancel it when `event()` returns. Raises InterruptedWorkError then.

    Only the event gets a task, which is not awaited at the end. A second task, for the work, cost several more
    iterations of the event loop per request; each takes about as long as streaming one token.
    """
    task = asyncio.current_task()
    assert task is not None
    before, came = task.cancelling(), False

    async def interrupt() -> None:
        nonlocal came
        await event()
        came = True
        task.cancel()

    waiting = asyncio.create_task(interrupt())
    try:
        return await work
    except asyncio.CancelledError:
        if came and task.cancelling() - 1 <= before:  # else the task itself is cancelled too
            raise InterruptedWorkError from None
        raise
    finally:
        waiting.cancel()
        if came:
            task.uncancel()
