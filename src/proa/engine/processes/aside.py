"""Who listens to an engine keeps off the CPU of its thread. Never: who that is, where the engine is."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


class Aside:
    """Moves the calling thread off some CPUs while it listens, and back afterwards.

    Where all CPUs are busy, Linux wakes a reader on the CPU of who wrote to it and lets it run first. An engine's
    workers keep all of its CPUs busy: on 2 cores telling a reader anywhere cost the engine 165 us, on the other CPU 10
    to 18 (benchmarks/probes/wake.py). Threads that are started meanwhile keep off these CPUs for good.
    """

    def __init__(self) -> None:
        self.cpus: Collection[int] = ()  # to keep off
        self._before: set[int] | None = None

    def listen(self) -> None:
        """Keep off these CPUs, unless there are no others."""
        if not self.cpus or self._before is not None:
            return
        allowed = os.sched_getaffinity(0)
        others = allowed.difference(self.cpus)
        if others and others != allowed:
            with suppress(OSError):  # not allowed here: as before
                os.sched_setaffinity(0, others)
                self._before = allowed

    def rest(self) -> None:
        if self._before is not None:
            with suppress(OSError):  # a control group has taken all of them meanwhile
                os.sched_setaffinity(0, self._before)
            self._before = None
