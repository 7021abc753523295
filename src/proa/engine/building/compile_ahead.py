"""Compiles all kernels that a planned model will launch, in parallel processes that do not use a GPU. Belongs here:
these processes, one event per kernel. Never: which kernels there are (rehearsal.py).

The calling process forks all others, which have Triton loaded already: one rehearses the model and sends the variants
that it finds, the others compile them meanwhile. If one of these dies, the kernel that it was compiling is reported as
failed, and another process takes its place.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from triton import knobs

from proa.engine.building.kept_variants import keep, key_of, read_kept
from proa.engine.building.rehearsal import rehearse
from proa.machine.cgroup import cgroup_limits
from proa.models.names import Declared
from proa.models.spec import Model
from proa.ops.ahead import Compiled, Compiler, Variant, recording
from proa.plan.packed_size import dummy_types
from proa.plan.plan import Plan
from proa.weights import sources
from proa.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
_NICENESS = 10  # the engine loads weights at the same time
# Kernels whose compilation takes longest (up to 4 s beside 15 others; the rest take 0.1 to 1.4 s): with this many
# processes they are compiled first, so that none is left to do at the end. With fewer, the most needed come first.
_SLOWEST = ("experts_grouped._block", "experts_fp8._block", "attention._prefill")
_MANY = 8


@dataclass(frozen=True)
class Listed:
    """The variants to compile and the number of processes. no_launchers: why kernels' launchers are not built too; ""
    if they are."""

    variants: Sequence[Variant]
    processes: int
    no_launchers: str


@dataclass(frozen=True)
class Done:
    """The result of a variant: it is in the cache on disk, or `compiled` has the error."""

    variant: Variant
    compiled: Compiled


Event = Listed | Done


def compile_ahead(
    plan: Plan, checkpoint: Checkpoint, declared: Declared, *, launchers: bool
) -> Iterator[Event]:  # fmt: skip
    """Compile for the planned GPU's architecture. Yields a Done for each variant, and once Listed, as soon as all are
    known. launchers: see Compiler. An earlier start may have kept the list in Triton's cache. Raises RuntimeError if
    the rehearsal fails."""
    if plan.gpu is None or plan.gpu.simulated:
        raise ValueError("kernels are compiled for a real GPU, but this plan has none")
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    major, minor = plan.gpu.capability
    capability = 10 * major + minor
    stored = stored_types(plan, checkpoint, declared)
    folder, key = Path(knobs.cache.dir), key_of(plan, declared.spec, stored, capability)
    kept = read_kept(folder, key)
    rehearsing = None if kept is not None else Rehearsing(partial(rehearsed, plan, declared.spec, stored, capability))
    waiting = Waiting(kept or (), rehearsing)
    try:
        compiler = Compiler(capability, launchers=launchers)
        missing = compiler.prepare()
        processes = _processors() if kept is None else min(len(kept), _processors())
        for event in compile_all(waiting, compiler, processes):
            if isinstance(event, Listed):
                if kept is None:
                    keep(folder, key, event.variants)
                yield replace(event, no_launchers=missing)
            else:
                yield event
    finally:
        waiting.end()


def rehearsed(plan: Plan, spec: Model, stored: Mapping[str, str], capability: int) -> Iterator[Sequence[Variant]]:
    """The kernel variants that the model's steps launch, the most needed first: after each step those that it is the
    first to launch."""
    with recording(capability) as recorder:
        known = 0
        for step in rehearse(plan, spec, stored, capability):
            step()
            if new := recorder.variants[known:]:
                known += len(new)
                yield new


class Rehearsing:
    """A forked process that sends the variants which it finds."""

    def __init__(self, find: Callable[[], Iterator[Sequence[Variant]]]) -> None:
        self.answers, theirs = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_rehearse, args=(find, theirs, os.getpid()), daemon=True)
        start_forked(self._process)
        theirs.close()

    def more(self) -> Sequence[Variant] | None:
        """Wait for the next variants; None: there are no more. Raises RuntimeError if the process fails."""
        try:
            found: Sequence[Variant] | str | None = self.answers.recv()
        except EOFError:
            self._process.join()
            found = f"its process ended with exit code {self._process.exitcode}"
        if isinstance(found, str):
            raise RuntimeError(f"the rehearsal that lists kernels failed: {found}")
        return found

    def end(self) -> None:
        _end(self._process, self.answers)


class Waiting:
    """The variants that no process compiles yet. A rehearsal may find more of them."""

    def __init__(self, known: Sequence[Variant], rehearsing: Rehearsing | None = None) -> None:
        self.known, self._rehearsing = list(known), rehearsing
        self._left = list(known)

    @property
    def sources(self) -> Sequence[Connection]:
        """Where more may come from; none if all are known."""
        return () if self._rehearsing is None else (self._rehearsing.answers,)

    def take_in(self) -> None:
        """Wait for more variants. Raises RuntimeError if the rehearsal fails."""
        if self._rehearsing is None:
            return
        more = self._rehearsing.more()
        if more is None:
            self.end()
        else:
            self.known += more
            self._left += more

    def next(self, *, slowest_first: bool) -> Variant | None:
        """The variant to compile now; None if none is known."""
        slow = [at for at, variant in enumerate(self._left) if variant.name in _SLOWEST] if slowest_first else []
        return self._left.pop(slow[-1] if slow else 0) if self._left else None

    def end(self) -> None:
        if self._rehearsing is not None:
            self._rehearsing.end()
            self._rehearsing = None


def compile_all(waiting: Waiting, compiler: Compiler, processes: int) -> Iterator[Event]:
    """Compile in `processes` processes. Yields each variant when it is done, and Listed once all are known. Raises
    RuntimeError if the rehearsal fails."""
    working = [_Process(compiler) for _ in range(processes)]
    listed = False
    try:
        while True:
            for process in working:
                if process.variant is None and (variant := waiting.next(slowest_first=processes >= _MANY)) is not None:
                    process.begin(variant)
            if not waiting.sources:
                if not listed:
                    listed = True
                    yield Listed(waiting.known, processes, "")
                working = _end_idle(working)
            if not working:
                return
            ready = wait([*waiting.sources, *(of.answers for of in working if of.variant is not None)])
            if any(source in ready for source in waiting.sources):
                waiting.take_in()
            for i, process in enumerate(working):
                if process.answers in ready:
                    yield process.answer()
                    if process.died:
                        working[i] = _Process(compiler)
    finally:
        for process in working:
            process.end()


def _end_idle(working: list[_Process]) -> list[_Process]:
    """End the processes that compile nothing, which would keep inherited files and locks; returns the others."""
    for process in working:
        if process.variant is None:
            process.end()
    return [process for process in working if process.variant is not None]


def stored_types(plan: Plan, checkpoint: Checkpoint, declared: Declared) -> dict[str, str]:
    """The stored type that the loader will find for each parameter, by our names."""
    if plan.load_format == "dummy":
        return dummy_types(declared.spec, plan.dummy_format)
    return sources.stored_types(sources.resolve(declared, checkpoint.tensors), checkpoint.tensors)


def _processors() -> int:
    quota = cgroup_limits(Path("/")).quota_cores
    usable = len(os.sched_getaffinity(0))
    return usable if quota is None else max(1, min(usable, int(quota)))


class _Process:
    """A process that compiles one variant after the other. `variant`: the current one."""

    def __init__(self, compiler: Compiler) -> None:
        self.variant: Variant | None = None
        self.died = False
        self.answers, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_work, args=(compiler, theirs, os.getpid()), daemon=True)
        start_forked(self._process)
        theirs.close()

    def begin(self, variant: Variant) -> None:
        self.variant = variant
        with suppress(OSError):  # it has died: `answer` reports it
            self.answers.send(variant)

    def answer(self) -> Done:
        """Wait for the result of `variant`."""
        variant = self.variant
        assert variant is not None
        self.variant = None
        try:
            return Done(variant, self.answers.recv())
        except (EOFError, OSError):
            self._process.join()
            self.died = True
            why = f"the process that compiled it ended with exit code {self._process.exitcode}"
            return Done(variant, Compiled(False, 0.0, why))

    def end(self) -> None:
        _end(self._process, self.answers)


def _end(process: BaseProcess, answers: Connection) -> None:
    answers.close()
    if process.is_alive():
        process.kill()
        process.join()


def start_forked(process: BaseProcess) -> None:
    """Start a forked process. Suppresses Python 3.12's warning about forks beside threads, which may hold locks: ours
    wait for input or have just ended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        process.start()


def begin_forked(parent: int) -> None:
    """Prepare the calling process, which was forked. It is killed when its parent, which has this process id, ends. It
    collects none of its parent's garbage: pinned memory and threads that belong to such objects do not exist here."""
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def _rehearse(find: Callable[[], Iterator[Sequence[Variant]]], to: Connection, parent: int) -> None:
    """Run in the forked process: send all variants, then None; an error is sent as a string."""
    begin_forked(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    try:
        for variants in find():
            to.send(variants)
        to.send(None)
    except Exception as error:
        log.exception("The rehearsal that lists kernels failed.")
        to.send(f"{type(error).__name__}: {error}")


def _work(compiler: Compiler, asked: Connection, parent: int) -> None:
    begin_forked(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    os.nice(_NICENESS)
    while True:
        try:
            variant = asked.recv()
        except EOFError:
            return
        asked.send(compiler.compile(variant))
