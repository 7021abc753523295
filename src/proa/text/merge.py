"""Runs several requests at once: their streams of chunks as one, or all their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from proa.types import Chunk

Chunks = AsyncGenerator[Chunk, None]
T = TypeVar("T")


async def merge(streams: Sequence[Chunks]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield (stream index, chunk) as chunks arrive. The first error ends the merged stream and is raised; closing it
    closes all streams."""
    if len(streams) == 1:  # without a task and a queue, which cost as much as detokenizing a token
        async with aclosing(streams[0]):
            async for chunk in streams[0]:
                yield 0, chunk
        return
    arrived: asyncio.Queue[tuple[int, Chunk] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(index: int, stream: Chunks) -> None:
        async with aclosing(stream):
            async for chunk in stream:
                arrived.put_nowait((index, chunk))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises the stream's error, if any
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_results(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and return their results in order. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
