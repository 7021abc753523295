"""A device's work in launch order: streams, marks (events), captured graphs. Never: the kernels.

Tests have a queue that computes on the calling thread (tests/on_host.py), so that an executor's launches and their
order are tested without a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol, Self

import torch

Cut = Callable[[Callable[[], None]], None]


class Mark(Protocol):
    """A point in a queue."""

    def wait(self) -> None:
        """Block until the device has passed the mark."""

    @property
    def passed(self) -> bool: ...

    def seconds_since(self, earlier: Self) -> float:
        """Device time between two timed marks that were passed."""


class Queue(Protocol):
    device: torch.device

    def current(self) -> AbstractContextManager[None]:
        """Context in which launches go to this queue."""

    def mark(self, *, timed: bool = False) -> Mark:
        """A mark after everything launched so far. timed: it can be used with seconds_since."""

    def after(self, mark: Mark) -> None:
        """Let everything launched from now on start when the device has passed the mark, of another queue."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `launch`; the returned call replays them. Addresses and scalars are baked in: what
        changes must be read from memory. `launch` must have run to its end before. Call in the context of `current`."""

    def capture_in_pieces(self, launch: Callable[[Cut], None]) -> Callable[[], None]:
        """Capture as `capture` does, for launches with actions of the host in between: `launch` passes each action to
        the function that it is given, instead of calling it, and each replay calls it there."""

    def finish(self) -> None:
        """Wait until everything launched so far has ended."""

    def finish_device(self) -> None:
        """Wait for all queues of the device, e.g. for buffers that were filled before this queue existed."""


class CudaQueue:
    """One CUDA stream. Its graphs share one memory pool, so each replay may overwrite other graphs' results there."""

    def __init__(self, device: torch.device, *, sleeps: bool = False, first: bool = False) -> None:
        """sleeps: a waiting thread blocks instead of spinning, which frees its CPU and returns a little later. first:
        thread blocks of this queue's kernels are scheduled before waiting ones of other queues."""
        self.device, self._sleeps = device, sleeps
        self._stream = torch.cuda.Stream(device, priority=-1 if first else 0)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self, *, timed: bool = False) -> CudaMark:
        return CudaMark(self._stream, sleeps=self._sleeps, timed=timed)

    def after(self, mark: Mark) -> None:
        if not isinstance(mark, CudaMark):
            raise TypeError(f"a CUDA stream waits for marks of other CUDA streams, not for {type(mark).__name__}")
        self._stream.wait_event(mark.event)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        replay: Callable[[], None] = graph.replay
        return replay

    def capture_in_pieces(self, launch: Callable[[Cut], None]) -> Callable[[], None]:
        pieces, graph = list[Callable[[], None]](), torch.cuda.CUDAGraph()

        def cut(action: Callable[[], None]) -> None:
            nonlocal graph
            graph.capture_end()
            pieces.extend((graph.replay, action))
            graph = torch.cuda.CUDAGraph()
            self._begin(graph)

        with _collecting_later():
            self._begin(graph)
            try:
                launch(cut)
            finally:
                graph.capture_end()
        pieces.append(graph.replay)
        return partial(_call_all, pieces)

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Begin a capture on the current stream, without the synchronisation and the collection of garbage of
        torch.cuda.graph, which would take far longer than a block's capture."""
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def finish(self) -> None:
        self.mark().wait()

    def finish_device(self) -> None:
        torch.cuda.synchronize(self.device)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Within the context no garbage is collected: freeing a graph would end a capture with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _call_all(pieces: Sequence[Callable[[], None]]) -> None:
    for piece in pieces:
        piece()


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream, *, sleeps: bool, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed, blocking=sleeps)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def passed(self) -> bool:
        done: bool = self.event.query()  # type: ignore[no-untyped-call]
        return done

    def seconds_since(self, earlier: CudaMark) -> float:
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1e3
