"""Measures the time of steps by stage. Never: the stages' work, reporting."""

from __future__ import annotations

import enum
import time


class Stage(enum.IntEnum):
    """Stages of a step. All but PROGRAM are host overhead beside the model's own time."""

    SCHEDULE = 0  # messages, planning, committing results
    INPUTS = 1  # writing the step's inputs
    PROGRAM = 2  # the model
    SAMPLE = 3
    PUBLISH = 4  # sending events to the frontend


class StepClock:
    """Total seconds in each stage. A lap, the time since the last call, counts for the stage that it ends."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(Stage)
        self._last = time.perf_counter()
        self.hidden = False  # True while the device computes another step: host time is overlapped, counted as PROGRAM

    def reset(self) -> None:
        """Forget all laps: the steps so far were no request's."""
        self._sums = [0.0] * len(Stage)
        self.start()

    def start(self) -> None:
        """Begin a lap now: the time before belongs to no step."""
        self._last = time.perf_counter()

    def lap(self, stage: Stage) -> None:
        now = time.perf_counter()
        self._sums[Stage.PROGRAM if self.hidden else stage] += now - self._last
        self._last = now

    def seconds(self) -> tuple[float, ...]:
        """Total seconds of each stage, in the order of Stage."""
        return tuple(self._sums)
