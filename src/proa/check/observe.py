"""Builds a path with the engine's own builders, runs requests on it, and returns what it computed. Never: comparing."""

from __future__ import annotations

import torch

from proa.check.drive import NotingRunner, Texts, keep_busy, run
from proa.check.notes import Notes, RecordedNotes, TensorNotes, watch
from proa.check.sample import Sample
from proa.check.verdict import Observed
from proa.engine.building.dtypes import DTYPES
from proa.engine.building.load import Build, fill, kv_storage, new_build, new_scheduler
from proa.engine.building.timeline import Timeline
from proa.engine.runner import Runner
from proa.engine.scheduling.scheduler import Scheduler
from proa.ops.sizes import buckets
from proa.plan.budget import SCORED_ROWS
from proa.plan.plan import Plan

MOVE_ROUNDS = 24  # of prompts of one repeated token, whose experts soon are hotter than others
MOVE_TOKENS = 12
_AFTER_MOVES = 2  # further rounds, so that copies arrive


def observe(name: str, plan: Plan, sample: Sample, texts: Texts, *, moving: bool = False) -> Observed | str:
    """Load the sampled model as planned and compute the texts. Returns why if nothing could be observed. Raises
    ProaError."""
    checkpoint, declared = sample.opened.checkpoint, sample.opened.declared
    torch.set_flush_denormal(True)
    build = new_build(plan, checkpoint, declared, Timeline())
    notes = _notes(build, plan)
    watch(build.model, notes)
    fill(build, plan, checkpoint, declared, lambda loading: None)
    executor = build.runner(lambda loading: None).executor
    scheduler, vocab = new_scheduler(plan), declared.spec.vocab
    if moving and not _move(scheduler, Runner(executor, plan.page_tokens), vocab):
        return f"no expert moved in {MOVE_ROUNDS} prompts"
    runner = NotingRunner(executor, plan.page_tokens, notes)
    sequences = run(scheduler, runner, vocab, texts)
    graphs = plan.gpu is not None and not plan.gpu.simulated
    kv = kv_storage(plan, checkpoint, declared)
    return Observed(name, sequences, kv, DTYPES[plan.dtype], graphs=graphs)


def _notes(build: Build, plan: Plan) -> Notes:
    if build.recorder is not None:
        return RecordedNotes(build.recorder)
    return TensorNotes(max(plan.max_batch_tokens, SCORED_ROWS, *buckets(plan.max_running)))


def _move(scheduler: Scheduler, runner: Runner, vocab: int) -> bool:
    """Compute prompts until experts have moved between GPU and RAM."""
    left = MOVE_ROUNDS
    while left > 0 and not runner.executor.counters().moved_bytes:
        keep_busy(scheduler, runner, vocab, [[left % vocab] * MOVE_TOKENS])
        left -= 1
    for i in range(_AFTER_MOVES if left else 0):
        keep_busy(scheduler, runner, vocab, [[(left + i + 1) % vocab] * MOVE_TOKENS])
    return bool(runner.executor.counters().moved_bytes)
