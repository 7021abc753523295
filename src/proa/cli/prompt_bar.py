"""The bar that `proa chat` shows on a terminal while a long prompt is computed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from proa.cli.api_client import PromptProgress
from proa.obs.units import format_duration

SHOWN_AFTER_S = 0.5  # a bar that appears for a moment is only noise


def can_show(console: Console) -> bool:
    """True if answer and bar go to one terminal: piped output gets no bar."""
    return console.is_terminal and sys.stdout.isatty()


class PromptBar:
    """Shows how many tokens of the prompt are computed, and the time left. A context manager, which removes the bar.

    It appears when the request is SHOWN_AFTER_S old, if at least as much time is left then.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._asked_s = console, clock, clock()
        self._first: tuple[float, int] | None = None  # the first report: its time, and tokens computed then
        self._shown: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> PromptBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, progress: PromptProgress) -> None:
        now_s = self._clock()
        left_s = self._left_s(progress, now_s)
        if self._shown is None:
            if now_s - self._asked_s < SHOWN_AFTER_S or left_s < SHOWN_AFTER_S:
                return
            self._shown = self._show(progress)
        bar, task = self._shown
        left = f"{format_duration(left_s)} left" if math.isfinite(left_s) else ""
        bar.update(task, completed=progress.processed, total=progress.total, left=left)

    def close(self) -> None:
        """Remove the bar, if it is shown."""
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

    def _left_s(self, progress: PromptProgress, now_s: float) -> float:
        """Estimate the time left by the rate since the first report; at the first one, by the rate since the request
        was sent, which is too low if the request waited. Infinite before any token is computed."""
        since_s, tokens = self._first or (self._asked_s, progress.cached)
        if self._first is None:
            self._first = (now_s, progress.processed)
        moved = progress.processed - tokens
        return (progress.total - progress.processed) * (now_s - since_s) / moved if moved > 0 else float("inf")

    def _show(self, progress: PromptProgress) -> tuple[Progress, TaskID]:
        columns = (
            TextColumn("prompt"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} tokens"),
            TextColumn("{task.fields[left]}"),
        )  # fmt: skip
        bar = Progress(*columns, console=self._console, transient=True)
        task = bar.add_task("prompt", completed=progress.processed, total=progress.total, left="")
        bar.start()
        return bar, task
