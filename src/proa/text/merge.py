"""Merges several async streams of chunks into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from proa.types import Chunk

Chunks = AsyncGenerator[Chunk, None]


async def merge(streams: Sequence[Chunks]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield (stream index, chunk) as chunks arrive. The first error ends the merged stream and is raised; closing it
    closes all streams."""
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
