"""Several streams of chunks as one. Never: what is in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from proa.types import Chunk

Chunks = AsyncGenerator[Chunk, None]


async def merge(streams: Sequence[Chunks]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """(stream's index, chunk) as they come. The first error ends all; closing this closes every stream."""
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
                item.result()  # raises what ended it, if it ended badly
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
