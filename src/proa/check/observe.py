"""Builds a path with the engine's own builders, runs requests on it, and returns what it computed. Never: comparing."""

from __future__ import annotations

import os
from functools import partial

import torch

from proa.check.adapt import Adapted
from proa.check.drive import NotingRunner, Texts, finish, sequences
from proa.check.notes import IDS, Notes, RecordedNotes, TensorNotes, place, watch
from proa.check.paths import Path, Streams
from proa.check.restore import run_with_tiers
from proa.check.sample import Sample
from proa.check.verdict import Observed
from proa.engine.building.dtypes import DTYPES
from proa.engine.building.load import Build, fill, kv_storage, new_build, new_scheduler, new_turns
from proa.engine.building.tiers import new_tiers
from proa.engine.building.timeline import Timeline
from proa.engine.engine import Engine
from proa.engine.executors.page_tiers import PageTiers
from proa.engine.runner import Runner
from proa.errors import ProaError
from proa.models.ranks import CPU
from proa.native.doorbell import Counters
from proa.ops.sizes import buckets
from proa.plan.budget import SCORED_ROWS
from proa.plan.plan import GpuPlan, Plan

MOVE_ROUNDS = 24  # of prompts of one repeated token, whose experts soon are hotter than others
MOVE_TOKENS = 12
_AFTER_MOVES = 2  # further rounds, so that copies arrive
_RUN_PAGES = 1  # of a run in RAM and files: prompts have fewer tokens than a run has in service


def observe(path: Path, of: Adapted, sample: Sample, texts: Texts) -> Observed | str:
    """Load the sampled model as planned and compute the texts. Returns why if nothing could be observed. Raises
    ProaError."""
    checkpoint, declared, plan = sample.opened.checkpoint, sample.opened.declared, of.plan
    torch.set_flush_denormal(True)
    build = new_build(plan, checkpoint, declared, Timeline())
    notes = _notes(build, plan)
    watch(build.model, notes, located=path.in_place)
    fill(build, plan, checkpoint, declared, lambda loading: None)
    executor = build.bind(lambda loading: None).executor
    vocab, caches = declared.spec.vocab, executor.caches
    if path.streams is not Streams.NOTHING and (why := _not_given(build, "prefill", "cpu")):
        return why
    if path.in_place and (why := _not_given(build, "co-fetch", "off")):
        return why
    if path.moving and not _move(_engine(Runner(executor), plan, vocab), vocab):
        return f"no expert moved in {MOVE_ROUNDS} prompts"
    runner = NotingRunner(executor, notes, located=path.in_place)

    def tiers(plan: Plan) -> PageTiers | None:
        return new_tiers(plan, checkpoint, caches, os.sched_getaffinity(0), _RUN_PAGES)

    before = executor.counters().pairs
    missing = run_with_tiers(plan, texts, caches, tiers, partial(_engine, runner, plan, vocab))
    if path.streams is not Streams.NOTHING:
        _refuse_unstreamed(executor.counters(), halved=path.halved)
    if path.in_place and in_ram_choices(runner, plan.gpus[0]) <= executor.counters().pairs - before:
        raise ProaError("the CPU computed all experts in RAM: the GPU read none of them in place")
    graphs = plan.gpu is not None and not plan.gpu.simulated
    kv = kv_storage(plan, checkpoint, declared)
    return Observed(path.name, sequences(runner), kv, DTYPES[plan.dtype], graphs=graphs, left_out=of.left_out | missing)


def _engine(runner: Runner, plan: Plan, vocab: int, tiers: PageTiers | None = None) -> Engine:
    return Engine(runner, new_scheduler(plan, tiers), vocab, turns=new_turns(runner, plan), tiers=tiers)


def _notes(build: Build, plan: Plan) -> Notes:
    if build.recorder is not None:
        return RecordedNotes(build.recorder)
    return TensorNotes(max(plan.max_batch_tokens, SCORED_ROWS, *buckets(plan.max_running)))


def _move(engine: Engine, vocab: int) -> bool:
    """Compute prompts of which nothing is compared, until experts have moved between GPU and RAM."""
    executor, left = engine.runner.executor, MOVE_ROUNDS
    while left > 0 and not executor.counters().moved_bytes:
        finish(engine, {f"busy {left}": [left % vocab] * MOVE_TOKENS})
        left -= 1
    for i in range(_AFTER_MOVES if left else 0):
        finish(engine, {f"after {i}": [(left + i + 1) % vocab] * MOVE_TOKENS})
    return bool(executor.counters().moved_bytes)


def _not_given(build: Build, name: str, off: str) -> str:
    """The reason why the planned ring, or reading in place, is missing after loading (the driver did not register RAM);
    empty if it is there. off: what the decision of this name says if it is missing."""
    rows = build.ready(0.0).decisions
    return next((row.why for row in rows if row.name == name and row.got == off), "")


def in_ram_choices(runner: NotingRunner, gpu: GpuPlan) -> int:
    """(token, expert) pairs of all steps whose expert is the CPU's. Those that the CPU was not given, the GPU
    computed."""
    count = 0
    for block, owners in zip(gpu.blocks, gpu.owners, strict=True):
        of_cpu = torch.tensor(owners) == CPU
        ids = [row[place(IDS, block)] for of in runner.requests.values() for row in of.rows.values()]
        count += int(of_cpu[torch.stack(ids).long()].sum())
    return count


def _refuse_unstreamed(counters: Counters, *, halved: bool) -> None:
    """Raise ProaError unless experts were copied to the ring, and, if `halved`, others were not."""
    if not counters.streamed:
        raise ProaError("no expert was copied to the ring")
    if halved != bool(counters.left_to_cpu):
        raise ProaError(f"the CPU was to compute {'some' if halved else 'no'} experts of prompts")
