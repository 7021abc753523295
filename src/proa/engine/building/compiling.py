"""The engine's side of compiling ahead: a forked process compiles while weights load, and a thread loads finished
kernels onto the GPU. Never: which kernels there are, compiling.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from proa.engine.building.compile_ahead import Done, Event, Listed, begin_forked, start_forked
from proa.engine.ipc import Loading
from proa.obs.progress import COMPILING
from proa.obs.units import format_duration
from proa.ops.ahead import Variant, hash_triton
from proa.types import Decision

log = logging.getLogger(__name__)

MOST_S = 15.0  # a start waits no longer; kernels that are not ready then are finished beside the first requests
_LOOK_S = 0.1
_FORK = multiprocessing.get_context("fork")
_SHOWN = 2  # failed kernels named in the start-up table


@dataclass
class _Progress:
    """Counts of kernels so far; only the listening thread writes."""

    listed: Listed | None = None
    compiled: int = 0
    cached: int = 0  # of the compiled ones, those from earlier starts
    loaded: int = 0
    failed: list[str] = field(default_factory=list)
    ended: bool = False
    broken: str = ""  # why compiling ahead stopped early; "" if it did not

    @property
    def complete(self) -> bool:
        """Whether every kernel that steps launch is on the GPU."""
        return self.listed is not None and self.loaded == len(self.listed.variants)


class Compiling:
    """Compiles in a forked process, which runs `events`; must be made before this process initialises CUDA. load: loads
    a variant onto the calling thread's GPU."""

    def __init__(self, events: Callable[[], Iterator[Event]], load: Callable[[Variant], None]) -> None:
        self._begin, self._load_one = time.perf_counter(), load
        mine, theirs = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_run, args=(events, theirs, os.getpid()), name="compiling")
        start_forked(self._process)
        atexit.register(self._process.kill)  # else this process would wait for it on exit
        theirs.close()
        self.progress = _Progress()
        self._enter: Callable[[], None] | None = None
        self._may_load = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(mine,), name="kernels", daemon=True)
        self._thread.start()

    def load_after(self, enter: Callable[[], None]) -> None:
        """Start loading kernels as they get ready, once CUDA is initialised. enter: called first by the loading thread,
        to select the GPU."""
        self._enter = enter
        self._may_load.set()

    def wait(self, report: Callable[[Loading], None], most_s: float = MOST_S) -> Decision:
        """Wait until all kernels are loaded or most_s seconds have passed since the start. Returns the start-up table's
        row with the counts."""
        progress = self.progress
        while not progress.ended and time.perf_counter() - self._begin < most_s:
            if progress.listed is not None and progress.compiled > progress.cached:
                report(Loading(COMPILING, progress.compiled, len(progress.listed.variants)))
            self._thread.join(_LOOK_S)
        return _row(progress, time.perf_counter() - self._begin)

    def _listen(self, events: Connection) -> None:
        progress = self.progress
        try:
            hash_triton()  # loading needs it; done here while the main thread initialises CUDA
            self._may_load.wait()
            if self._enter is not None:
                self._enter()
            while (event := events.recv()) is not None:
                self._take(event)
        except EOFError:
            self._process.join()
            progress.broken = f"the compiling process ended with exit code {self._process.exitcode}"
        except Exception as error:
            log.exception("Loading kernels ahead failed.")
            progress.broken = f"{type(error).__name__}: {error}"
        progress.ended = True

    def _take(self, event: Event | str) -> None:
        progress = self.progress
        match event:
            case Listed():
                progress.listed = event
            case Done(variant, compiled):
                progress.compiled += 1
                progress.cached += compiled.cached
                if compiled.error:
                    log.warning("Compiling the kernel %s failed: %s", variant.name, compiled.error)
                    progress.failed.append(f"{variant.name}: {compiled.error.splitlines()[0]}")
                else:
                    self._load(variant)
            case str():
                progress.broken = event

    def _load(self, variant: Variant) -> None:
        try:
            self._load_one(variant)
            self.progress.loaded += 1
        except Exception as error:  # noqa: BLE001 - the first launch will raise the same error
            log.warning("Loading the kernel %s failed: %s", variant.name, error)
            self.progress.failed.append(f"{variant.name}: {error}")


def _run(events: Callable[[], Iterator[Event]], to: Connection, parent: int) -> None:
    """Run in the forked process: send every event, then None; an error is sent as a string."""
    begin_forked(parent)
    try:
        for event in events():
            to.send(event)
    except Exception as error:
        log.exception("Compiling kernels ahead failed.")
        to.send(f"{type(error).__name__}: {error}")
    to.send(None)


def _row(progress: _Progress, seconds: float) -> Decision:
    """The start-up table's row."""
    later = "when they are first needed, one after the other"
    if progress.listed is None or (progress.broken and not progress.compiled):
        why = progress.broken or f"the list of kernels to compile was not ready after {format_duration(seconds)}"
        return Decision("GPU kernels", "auto", "compiled late", f"{why}; kernels are compiled {later}")
    total, fresh = len(progress.listed.variants), progress.compiled - progress.cached
    processes = f"by {progress.listed.processes} processes"
    parts = [f"{fresh} compiled in {format_duration(seconds)} {processes}"] if fresh else []
    parts += [f"{progress.cached} of {total} kept from earlier starts"] if progress.cached else []
    if progress.failed:
        parts.append(f"{len(progress.failed)} failed ({'; '.join(progress.failed[:_SHOWN])})")
    missing = total - progress.compiled
    if missing:
        parts.append(f"{missing} are compiled beside the first requests" if not progress.broken else progress.broken)
    got = "in part" if missing or progress.failed else "compiled" if fresh else "kept"
    return Decision("GPU kernels", "auto", got, "; ".join(parts))
