"""Device time of decode steps and of prefill blocks computed between them. Never: waiting."""

from __future__ import annotations

from collections import deque

from proa.engine.executors.device_queue import Mark, Queue
from proa.engine.executors.executor import Pace

WINDOW_BLOCKS = 16
MOST_PENDING = 64  # launches whose time was not read yet: without prompts in turns nothing reads it


class StepTimer:
    """Times are read when the device has passed the marks. That of a block is the mean of the last WINDOW_BLOCKS: with
    streamed experts some wait for copies and the next ones do not."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque()  # seconds and blocks of the last parts
        self._pace = Pace(0.0, 0.0)
        self._begun: tuple[Queue, Mark] | None = None
        self._pending: list[tuple[Mark, Mark, int]] = []

    def begin(self, queue: Queue) -> None:
        """Begin the time of a launch to this queue."""
        self._begun = queue, queue.mark(timed=True)

    def end(self, num_blocks: int = 0) -> None:
        """End the time of a launch: num_blocks blocks of a step in parts, or a whole step (0). Without a `begin` before
        it, does nothing."""
        if self._begun is not None:
            queue, begun = self._begun
            self._pending.append((begun, queue.mark(timed=True), num_blocks))
            self._begun = None
            del self._pending[:-MOST_PENDING]

    def forget_blocks(self) -> None:
        """Start anew for another step in parts, the time of whose blocks is unknown."""
        self._last.clear()
        self._pending = [of for of in self._pending if not of[2]]
        self._pace = self._pace._replace(block_s=0.0)

    def _block_s(self, seconds: float, num_blocks: int) -> float:
        """Mean time of a block, with this part."""
        self._last.append((seconds, num_blocks))
        while sum(blocks for _, blocks in self._last) - self._last[0][1] >= WINDOW_BLOCKS:
            self._last.popleft()
        return sum(took_s for took_s, _ in self._last) / sum(blocks for _, blocks in self._last)

    def pace(self) -> Pace:
        """The latest durations, of launches that the device has finished."""
        while self._pending and self._pending[0][1].passed:
            before, behind, num_blocks = self._pending.pop(0)
            seconds = behind.seconds_since(before)
            if num_blocks:
                self._pace = self._pace._replace(block_s=self._block_s(seconds, num_blocks))
            else:
                self._pace = self._pace._replace(step_s=seconds)
        return self._pace
