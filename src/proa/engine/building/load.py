"""Makes a running Engine from a plan: builds, loads weights, allocates caches. Never: decisions, processes."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from proa.cache.pages import PageAllocator
from proa.cache.pool import KvStorage, allocate_pool
from proa.cache.radix import PrefixCache
from proa.cache.states import StateCopies
from proa.engine.building.bound import Bound
from proa.engine.building.cpu_side import CpuSide
from proa.engine.building.dtypes import DTYPES
from proa.engine.building.threads import choose_threads
from proa.engine.building.tiers import new_tiers
from proa.engine.building.timeline import Timeline
from proa.engine.engine import Engine
from proa.engine.executors.batch import step_limits
from proa.engine.executors.crew import choose_few
from proa.engine.executors.eager import EagerExecutor
from proa.engine.executors.recorded import RecordedExecutor
from proa.engine.ipc import Loading, Ready
from proa.engine.runner import Runner
from proa.engine.scheduling.phases import LEAST_ROWS_ON_CPU, FixedPhases, FreePhases, Phases
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.scheduler import Scheduler
from proa.engine.scheduling.tiers import Tiers
from proa.engine.turns import NoTurns, PrefillTurns
from proa.layers.decoder import Decoder
from proa.machine.usage import peak_rss_bytes
from proa.models.names import Declared
from proa.models.spec import Model
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.reference import reference
from proa.ops.table import Ops, Target
from proa.plan.plan import Plan, Workers
from proa.weights.checkpoint import Checkpoint, open_checkpoint
from proa.weights.dummy import fill_dummy
from proa.weights.kv_scales import kv_scales
from proa.weights.load import load_weights

if TYPE_CHECKING:  # it imports what only a start with a GPU needs
    from proa.engine.building.lending import Lender

REPORT_EVERY_S = 0.1
TRIAL_TOKEN_STRIDE = 7919
PREFILL_TRIAL_TOKENS = 32  # enough to be bound by arithmetic, few enough to be quick


def load_engine(
    plan: Plan, report: Callable[[Loading], None], timeline: Timeline | None = None, cpus: Collection[int] = ()
) -> tuple[Engine, Ready]:
    """Load the planned model. cpus: for threads of the prefix cache's tiers; empty: those of the calling thread. Raises
    ModelError and ResourceError."""
    cpus = cpus or os.sched_getaffinity(0)
    timeline = timeline or Timeline()
    torch.set_flush_denormal(True)
    checkpoint = open_checkpoint(Path(plan.path), plan.load_format, plan.override_config)
    declared = checkpoint.declare(plan.ignore_config_keys)
    timeline.mark("headers")
    build = new_build(plan, checkpoint, declared, timeline)
    timeline.mark("model made")
    begin = time.perf_counter()
    fill(build, plan, checkpoint, declared, report)
    load_seconds = time.perf_counter() - begin
    timeline.mark("weights")
    bound = build.bind(report)
    runner = Runner(bound.executor)
    helpers = build.pool if plan.gpu is None else None  # with a GPU the workers poll its doorbell between steps
    tiers = new_tiers(plan, checkpoint, bound.executor.caches, cpus)
    turns, scheduler = new_turns(runner, plan), new_scheduler(plan, tiers, bound.lender)
    engine = Engine(runner, scheduler, declared.spec.vocab, bound.saver, turns, helpers, tiers)
    gc.collect()
    gc.freeze()  # the model's objects live as long as the process: later collections need not look at them
    timeline.mark("ready")
    return engine, msgspec.structs.replace(build.ready(load_seconds), timeline=timeline.marks)


class Build(Protocol):
    """A planned model in three steps: made by the constructor, filled through `targets`, bound by `bind`."""

    @property
    def pool(self) -> Pool | None: ...

    @property
    def flush(self) -> Callable[[], None] | None: ...

    @property
    def model(self) -> Decoder: ...

    @property
    def recorder(self) -> Recorder | None:
        """The recorder that the model's ops append to; None if they compute when they are called."""

    def targets(self) -> dict[str, Target]: ...

    def bind(self, report: Callable[[Loading], None]) -> Bound:
        """Allocate caches and make the executor. Called once, after the weights are loaded."""

    def ready(self, load_seconds: float) -> Ready:
        """The message for the frontend. Called after `bind`."""


def new_turns(runner: Runner, plan: Plan) -> PrefillTurns | NoTurns:
    """The planned turns of prefill and decode, for a scheduler made by new_scheduler."""
    if plan.max_itl is None:
        return NoTurns()
    fixed = plan.pass_tokens > 0 or plan.prompt_cell_tokens is not None
    return PrefillTurns(runner, plan.max_itl, fixed=fixed, over_tokens=plan.over_tokens)


def kv_storage(plan: Plan, checkpoint: Checkpoint, declared: Declared) -> KvStorage:
    """The planned type of K and V, with the checkpoint's scales. Raises WeightsError."""
    scales = kv_scales(checkpoint, declared) if plan.kv_dtype == "float8_e4m3fn" else ()
    return KvStorage(DTYPES[plan.kv_dtype], scales)


def new_build(plan: Plan, checkpoint: Checkpoint, declared: Declared, timeline: Timeline) -> Build:
    """Make the planned model, whose weights are uninitialised."""
    spec, kv = declared.spec, kv_storage(plan, checkpoint, declared)
    if plan.workers is None:
        return _Eager(plan, spec, kv)
    if plan.gpu is None:
        return _Native(plan, plan.workers, spec, kv)
    # A start on the CPU needs neither, and saves 70 ms of imports; Triton comes only with CUDA builds of torch.
    if plan.gpu.simulated:
        simulated: Build = importlib.import_module("proa.engine.building.sim_gpu").SimBuild(plan, spec, kv)
        return simulated
    gpu = importlib.import_module("proa.engine.building.gpu")
    build: Build = gpu.GpuBuild(plan, checkpoint, declared, kv, timeline)
    return build


def fill(
    build: Build, plan: Plan, checkpoint: Checkpoint, declared: Declared, report: Callable[[Loading], None]
) -> None:  # fmt: skip
    """Load the weights. Raises WeightsError."""
    targets = build.targets()
    if plan.load_format == "dummy":
        fill_dummy(
            declared.spec, targets, plan.dummy_seed, plan.dummy_router, build.pool, build.flush, plan.dummy_format
        )
    else:
        load_weights(checkpoint, declared, targets, _paced(report), build.pool, build.flush)


class _Eager:
    """Builds a model of plain torch ops on the CPU."""

    pool: Pool | None = None
    flush: Callable[[], None] | None = None
    recorder: Recorder | None = None

    def __init__(self, plan: Plan, spec: Model, kv: KvStorage) -> None:
        self._plan, self._spec, self._kv, self._dtype = plan, spec, kv, DTYPES[plan.dtype]
        torch.set_num_threads(plan.threads)
        self.model = Decoder(spec, reference(self._dtype))

    def targets(self) -> dict[str, Target]:
        return dict(self.model.parameters())

    def bind(self, report: Callable[[Loading], None]) -> Bound:
        plan = self._plan
        caches = allocate_pool(
            self._spec, plan.num_pages, plan.page_tokens, self._dtype, sequences=plan.state_slots, kv=self._kv
        )
        self._executor = EagerExecutor(self.model, caches, plan.page_tokens)
        if not plan.deterministic:  # torch's sums depend on the number of threads
            tokens = min(PREFILL_TRIAL_TOKENS, plan.num_pages * plan.page_tokens)
            choose_threads(self._executor, Runner(self._executor), plan.threads, tokens, plan.page_tokens)
        return Bound(self._executor)

    def ready(self, load_seconds: float) -> Ready:
        nbytes = self._spec.num_params * self._dtype.itemsize
        return Ready(
            load_seconds=load_seconds,
            weights_bytes=nbytes,
            ops={field.name: "torch" for field in fields(Ops)},
            decode_threads=self._executor.decode_threads,
            prefill_threads=self._executor.prefill_threads,
            peak_rss_bytes=peak_rss_bytes(),
        )


class _Native:
    """Builds a recorded program of native ops over packed weights."""

    flush: Callable[[], None] | None = None

    def __init__(self, plan: Plan, workers: Workers, spec: Model, kv: KvStorage) -> None:
        self._plan, self._workers, self._spec, self._kv = plan, workers, spec, kv
        torch.set_num_threads(1)  # torch's remaining ops are small, and its threads would compete with the workers
        self._cpu = CpuSide(workers, plan.isa)
        self._cpu.bind_caller()
        self.pool = self._cpu.pool
        pages = -(-plan.context_tokens // plan.page_tokens)
        self.recorder = Recorder(self.pool, self._cpu.memory, plan.max_batch_tokens, plan.max_running, pages)
        self.model = Decoder(spec, CpuOps(self.recorder).table())

    def targets(self) -> dict[str, Target]:
        return dict(self.model.parameters())

    def bind(self, report: Callable[[Loading], None]) -> Bound:
        plan = self._plan
        caches = allocate_pool(
            self._spec, plan.num_pages, plan.page_tokens, torch.bfloat16, sequences=plan.state_slots, kv=self._kv
        )
        executor = RecordedExecutor(
            self.model, self.recorder, caches, step_limits(plan), self._cpu.crew, deterministic=plan.deterministic
        )
        self._cpu.note_unbound()

        def step(i: int, share: float) -> None:
            executor.try_step(i * TRIAL_TOKEN_STRIDE % self._spec.vocab, share)  # different tokens select other experts

        chosen = choose_few(self._cpu.crew, self._workers.trials, step, saving=self._workers.saving)
        self._cpu.decisions += [chosen] if chosen else []
        return Bound(executor)

    def ready(self, load_seconds: float) -> Ready:
        ready = self._cpu.ready(load_seconds, f"native {self.pool.isa}")
        return msgspec.structs.replace(ready, caller_cpus=list(self._cpu.caller_cpus))


def new_scheduler(plan: Plan, tiers: Tiers | None = None, lender: Lender | None = None) -> Scheduler:
    """A scheduler with the planned limits, pages and prefix cache, all empty. tiers: behind the prefix cache. lender:
    lends its idle pages."""
    allocator = PageAllocator(plan.num_pages, lowest_first=lender is not None)
    copies = StateCopies(plan.max_running, plan.state_copies) if plan.state_copies else None
    prefix_cache = PrefixCache(plan.page_tokens, allocator, copies) if plan.prefix_cache else None
    scheduler = Scheduler(
        Limits.of(plan), allocator, prefix_cache, turns=plan.max_itl is not None, phases=_phases(plan), tiers=tiers
    )  # fmt: skip
    if lender is not None:
        lender.lend_to(scheduler, allocator, prefix_cache, tiers=tiers is not None)
    return scheduler


def _phases(plan: Plan) -> Phases:
    on_cpu = plan.workers is not None and plan.gpu is None
    if not plan.deterministic:
        return FreePhases(LEAST_ROWS_ON_CPU) if on_cpu else FreePhases()
    on_torch = plan.workers is None or (plan.gpu is not None and plan.gpu.simulated)
    # The bits of torch's matrix products depend on the number of rows.
    return FixedPhases(plan.cells, one_decode=on_torch, keeps_states=plan.state_copies > 0)


def _paced(report: Callable[[Loading], None]) -> Callable[[int, int], None]:
    """A progress callback that reports at most every REPORT_EVERY_S, with the time left at the average rate so far."""
    begin = time.perf_counter()
    last = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < REPORT_EVERY_S and done_bytes < total_bytes:
            return
        last = now
        eta_s = (now - begin) / done_bytes * (total_bytes - done_bytes) if done_bytes else None
        report(Loading("loading weights", done_bytes, total_bytes, eta_s))

    return progress
