"""Compiles all kernels that a planned model will launch, in parallel processes that do not use a GPU. Belongs here:
these processes, one event per kernel. Never: which kernels there are (rehearsal.py).

The calling process rehearses the model, then forks processes, which have Triton loaded already. If a process dies, the
kernel that it was compiling is reported as failed, and another process takes its place.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from triton import knobs

from proa.engine.building.kept_variants import kept_or_made, key_of
from proa.engine.building.rehearsal import rehearse
from proa.machine.cgroup import cgroup_limits
from proa.models.names import Declared
from proa.models.spec import Model
from proa.ops.ahead import Compiled, Compiler, Variant, recording
from proa.plan.packed_size import dummy_types
from proa.plan.plan import Plan
from proa.weights import sources
from proa.weights.checkpoint import Checkpoint

_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
_NICENESS = 10  # the engine loads weights at the same time


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
    """Compile for the planned GPU's architecture, the most needed variants first. Yields Listed, then a Done for each
    variant. launchers: see Compiler. Raises what the rehearsal raises."""
    if plan.gpu is None or plan.gpu.simulated:
        raise ValueError("kernels are compiled for a real GPU, but this plan has none")
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    major, minor = plan.gpu.capability
    compiler = Compiler(10 * major + minor, launchers=launchers)
    missing: list[str] = []
    preparing = threading.Thread(target=lambda: missing.append(compiler.prepare()))
    preparing.start()
    variants = variants_of(plan, checkpoint, declared)
    preparing.join()  # before anything is forked
    processes = min(len(variants), _processors())
    yield Listed(variants, processes, missing[0])
    yield from compile_all(variants, compiler, processes)


def variants_of(plan: Plan, checkpoint: Checkpoint, declared: Declared) -> Sequence[Variant]:
    """All kernel variants that the model's steps launch, the most needed first. An earlier start may have kept the
    list in Triton's cache."""
    gpu = plan.gpu
    if gpu is None:
        raise ValueError("this plan has no GPU")
    capability = 10 * gpu.capability[0] + gpu.capability[1]
    stored = stored_types(plan, checkpoint, declared)
    key = key_of(plan, declared.spec, stored, capability)
    return kept_or_made(Path(knobs.cache.dir), key, lambda: _rehearsed(plan, declared.spec, stored, capability))


def _rehearsed(plan: Plan, spec: Model, stored: Mapping[str, str], capability: int) -> Sequence[Variant]:
    with recording(capability) as recorder:
        for step in rehearse(plan, spec, stored, capability):
            step()
    return recorder.variants


def compile_all(variants: Sequence[Variant], compiler: Compiler, processes: int) -> Iterator[Done]:
    """Compile in `processes` processes. Yields each variant when it is done."""
    waiting = iter(range(len(variants)))
    working = [_Process(variants, compiler, waiting) for _ in range(processes)]
    try:
        while working := [process for process in working if process.at is not None]:
            ready = wait([process.answers for process in working])
            for i, process in enumerate(working):
                if process.answers not in ready or process.at is None:
                    continue
                done = Done(variants[process.at], process.answer())
                if process.at is None:  # an idle process would keep inherited files and locks
                    process.end()
                if process.died:
                    working[i] = _Process(variants, compiler, waiting)
                yield done
    finally:
        for process in working:
            process.end()


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
    """A process that compiles one variant after the other. `at`: index of the current one; None: none is left."""

    def __init__(self, variants: Sequence[Variant], compiler: Compiler, waiting: Iterator[int]) -> None:
        self._waiting, self.died = waiting, False
        self.answers, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_work, args=(variants, compiler, theirs, os.getpid()), daemon=True)
        self.at = next(waiting, None)
        if self.at is not None:
            start_forked(self._process)
            self.answers.send(self.at)
        theirs.close()

    def answer(self) -> Compiled:
        """Return the result of variant `at` and start the next one."""
        try:
            compiled: Compiled = self.answers.recv()
            self.at = next(self._waiting, None)
            if self.at is not None:
                self.answers.send(self.at)
        except (EOFError, OSError):
            self._process.join()
            self.at, self.died = None, True
            return Compiled(False, 0.0, f"the process that compiled it ended with exit code {self._process.exitcode}")
        return compiled

    def end(self) -> None:
        self.answers.close()
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


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


def _work(variants: Sequence[Variant], compiler: Compiler, asked: Connection, parent: int) -> None:
    begin_forked(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    os.nice(_NICENESS)
    while True:
        try:
            at = asked.recv()
        except EOFError:
            return
        asked.send(compiler.compile(variants[at]))
