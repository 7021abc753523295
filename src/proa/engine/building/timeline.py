"""Records when the stages of an engine's start ended. Never: naming the stages."""

from __future__ import annotations

from proa.machine.usage import process_age_s


class Timeline:
    """`marks`: seconds from this process's begin to the end of each stage, by stage, in order."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        self.marks[stage] = round(process_age_s(), 3)
