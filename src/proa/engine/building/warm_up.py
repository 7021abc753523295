"""Runs warm-up steps before the first request. Never: which steps there are, compiling kernels (compiling.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from proa.engine.ipc import Loading
from proa.obs.progress import WARMING
from proa.obs.units import format_duration
from proa.types import Decision


def warm_up(
    tasks: Sequence[Callable[[], None]],
    report: Callable[[Loading], None],
    go_on: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> Decision:
    """Run the tasks, the most needed first, as long as `go_on` is true (start_time.py). Returns the start-up table's
    row with the count."""
    begin, done = clock(), 0
    for task in tasks:
        report(Loading(WARMING, done, len(tasks)))
        if not go_on():
            break
        task()
        done += 1
    took = format_duration(clock() - begin)
    if done == len(tasks):
        report(Loading(WARMING, done, done))
        return Decision("first steps", "auto", "tried", f"{done} batch sizes in {took}; others when first needed")
    why = f"{done} of {len(tasks)} batch sizes in {took}; the others when first needed"
    return Decision("first steps", "auto", "in part", why)
