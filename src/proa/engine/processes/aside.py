"""Keeps a frontend's thread off the engine thread's CPU. Never: choosing CPUs, messages."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


class Aside:
    """Moves the calling thread off `cpus` while it reads an engine's messages, and restores its affinity afterwards.

    When all CPUs are busy, Linux wakes the reader of a socket on the writer's CPU and runs it before the writer. An
    engine's workers keep all of its CPUs busy: on 2 cores a write cost the engine 165 us, and 10 to 18 us with the
    reader bound to the other CPU (benchmarks/probes/wake.py). Threads started between listen() and rest() inherit the
    affinity for good.
    """

    def __init__(self) -> None:
        self.cpus: Collection[int] = ()  # CPUs to avoid; empty: never move
        self._before: set[int] | None = None

    def listen(self) -> None:
        """Exclude `cpus` from the calling thread's affinity, unless it has no other CPUs."""
        if not self.cpus or self._before is not None:
            return
        allowed = os.sched_getaffinity(0)
        others = allowed.difference(self.cpus)
        if others and others != allowed:
            with suppress(OSError):  # not permitted: the affinity stays as it is
                os.sched_setaffinity(0, others)
                self._before = allowed

    def rest(self) -> None:
        """Restore the affinity that the thread had before listen()."""
        if self._before is not None:
            with suppress(OSError):  # a control group has removed all of these CPUs since
                os.sched_setaffinity(0, self._before)
            self._before = None
