"""Shows progress of downloads and loading: a bar with bytes/s and ETA on a terminal, else plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from proa.obs.units import format_bytes, format_duration, format_rate
from proa.types import ProgressCallback

COMPILING, WARMING = "compiling GPU kernels", "running warm-up steps"
TRYING = "comparing plans"
CHECKING, COMPARING = "running paths", "comparing layers"
COUNTED = {COMPILING, WARMING, TRYING, CHECKING, COMPARING}  # phases that count items, not bytes

_LINE_EVERY_S = 5.0


@contextmanager
def show_progress(console: Console) -> Iterator[ProgressCallback]:
    """Yield a function to call with (phase, done_bytes, total_bytes), at any rate; phases run one after another. A
    terminal gets a bar per phase; a file or pipe gets a line every few seconds."""
    if not console.is_terminal:
        yield _Lines(console, time.monotonic)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=None), _Amount(binary_units=True),
        _Speed(), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress)


class _Amount(DownloadColumn):
    def render(self, task: Task) -> Text:
        if task.description in COUNTED:
            return Text(f"{task.completed:.0f}/{task.total or 0:.0f}", style="progress.download")
        return super().render(task)


class _Speed(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        return Text() if task.description in COUNTED else super().render(task)


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total_bytes or None)
        self._progress.update(self._tasks[phase], completed=done_bytes, total=total_bytes or None)


class _Lines:
    """Prints a line when a phase begins, every _LINE_EVERY_S, and when it ends."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._phase = ""
        self._began = (0.0, 0)  # the phase's start: time, and bytes already there (of a resumed download)
        self._next_s = 0.0
        self._ended = False

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if phase != self._phase:
            self._phase, self._began, self._next_s, self._ended = phase, (now, done_bytes), now, False
        ends = 0 < total_bytes <= done_bytes
        if self._ended or (now < self._next_s and not ends):
            return
        self._next_s, self._ended = now + _LINE_EVERY_S, ends
        self._console.print(self._line(done_bytes, total_bytes, now), soft_wrap=True, markup=False)

    def _line(self, done_bytes: int, total_bytes: int, now: float) -> str:
        if self._phase in COUNTED:
            return f"{self._phase}: {done_bytes} of {total_bytes}"
        elapsed_s, moved = now - self._began[0], done_bytes - self._began[1]
        words = [f"{self._phase}: {format_bytes(done_bytes)}"]
        if total_bytes:
            words[0] += f" of {format_bytes(total_bytes)} ({100 * done_bytes / total_bytes:.0f} %)"
        if elapsed_s > 0 and moved > 0:
            words.append(format_rate(moved / elapsed_s))
            if done_bytes < total_bytes:
                words.append(f"{format_duration((total_bytes - done_bytes) * elapsed_s / moved)} left")
        return ", ".join(words)
