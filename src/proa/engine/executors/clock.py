"""Where the time of steps goes, stage by stage. Never: what the stages do, what is made of the sums."""

from __future__ import annotations

import enum
import time


class Stage(enum.IntEnum):
    """All but PROGRAM is what the engine adds to the model's own time."""

    SCHEDULE = 0  # messages, the plan, taking the results in
    INPUTS = 1  # telling the model what to compute
    PROGRAM = 2  # the model
    SAMPLE = 3
    PUBLISH = 4  # telling the frontend


class StepClock:
    """Seconds spent in each stage, all together: a lap belongs to the stage that it ends."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(Stage)
        self._last = time.perf_counter()
        self.hidden = False  # while the device has another step to compute: what is done meanwhile adds nothing

    def start(self) -> None:
        """What went before belongs to no step."""
        self._last = time.perf_counter()

    def lap(self, stage: Stage) -> None:
        now = time.perf_counter()
        self._sums[Stage.PROGRAM if self.hidden else stage] += now - self._last
        self._last = now

    def seconds(self) -> tuple[float, ...]:
        """Of each stage, in their order."""
        return tuple(self._sums)
