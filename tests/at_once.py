"""Tests in several processes at once (pytest-xdist). Belongs here: who waits for whom. Never: what is tested."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
MOST_PROCESSES = 4  # each has torch, and in time two gigabytes
INSIDE_A_TEST = "PYTEST_CURRENT_TEST" in os.environ  # of another run, which this one would wait for


def processes(gpu: bool) -> int:
    """One a core; but what a GPU has is not divided."""
    return 1 if gpu else min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


@contextmanager
def beside_others(alone: bool) -> Iterator[None]:
    """A test runs; `alone`: it has waited for the others to end, and none begins before it ends.

    A run inside a test does not wait: a test that waits to run alone has the turn until that test ends.
    """
    if INSIDE_A_TEST:
        yield
        return
    turn, running = os.open(__file__, os.O_RDONLY), os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)  # so that a test that waits to run alone is next
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield
    finally:
        fcntl.flock(running, fcntl.LOCK_UN)  # closing it would leave the lock to a process that the test forked
        os.close(running)
        os.close(turn)
