"""Device time of decode steps and of prefill blocks computed between them. Never: waiting."""

from __future__ import annotations

from proa.engine.executors.device_queue import Mark, Queue
from proa.engine.executors.executor import Pace


class StepTimer:
    """Times are read when the device has passed the marks."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._pace = Pace(0.0, 0.0)
        self._begun: Mark | None = None
        self._pending: list[tuple[Mark, Mark, int]] = []

    def begin(self) -> None:
        self._begun = self._queue.mark(timed=True)

    def end(self, num_blocks: int = 0) -> None:
        """End the time of a launch: num_blocks blocks of a step in parts, or a whole step (0). Without a `begin` before
        it, does nothing."""
        if self._begun is not None:
            self._pending.append((self._begun, self._queue.mark(timed=True), num_blocks))
            self._begun = None

    def pace(self) -> Pace:
        """The latest durations, of launches that the device has finished."""
        while self._pending and self._pending[0][1].passed:
            before, behind, num_blocks = self._pending.pop(0)
            seconds = behind.seconds_since(before)
            if num_blocks:
                self._pace = self._pace._replace(block_s=seconds / num_blocks)
            else:
                self._pace = self._pace._replace(step_s=seconds)
        return self._pace
