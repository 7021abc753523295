"""Real engines over tiny checkpoints that record the logits of every row they compute. Never: tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proa.cache.pages import PageAllocator
from proa.cache.pool import KvStorage, allocate_pool
from proa.cache.radix import PrefixCache
from proa.cache.states import StateCopies
from proa.engine.engine import Engine
from proa.engine.executors.batch import StepBatch, StepLimits
from proa.engine.executors.eager import EagerExecutor
from proa.engine.executors.executor import Executor, S
from proa.engine.executors.recorded import RecordedExecutor
from proa.engine.executors.session import Session
from proa.engine.runner import Flight, Runner, StepOutput
from proa.engine.scheduling.copying import CopyRules
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.scheduler import Scheduler
from proa.layers.decoder import Decoder
from proa.models.spec import Model
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory
from proa.ops.reference import reference
from proa.ops.table import NewExperts
from proa.types import EngineRequest, Sampling, TokenEvent
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights

HEAD_ROWS = 64
COPIES, RULES = 12, CopyRules(every_tokens=1, cut_tokens=1, asking_tokens=1)  # state copies at every page boundary


class RecordingRunner(Runner):
    """Records logits[request id][position] of every row computed; a later computation replaces an earlier one."""

    def __init__(self, executor: Executor[Any]) -> None:
        super().__init__(executor, overlap=False)
        self.logits: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.rows_computed = 0

    def wait(self, flight: Flight, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        out = super().wait(flight, meanwhile)
        parts, plan = [], flight.plan
        for first in range(0, plan.num_tokens, HEAD_ROWS):
            rows = range(first, min(first + HEAD_ROWS, plan.num_tokens))
            parts.append(self.executor.logits_of(flight.step, rows).clone())
        logits = iter(torch.cat(parts))
        for item in plan.items:
            for position in range(item.start, item.start + item.num_tokens):
                self.logits[item.request.id][position] = next(logits)
                self.rows_computed += 1
        return out


@dataclass(frozen=True)
class Loaded:
    """A tiny model's weights, and a factory of its executors."""

    spec: Model
    make: Callable[..., Executor[Any]]  # arguments: StepLimits, number of pages
    decoder: Decoder | None = None  # for eager executors


def load_decoder(
    folder: Path, dtype: torch.dtype = torch.float32, kv: KvStorage | None = None, *,
    new_experts: NewExperts | None = None, session: Session | None = None, **override_config: object,
) -> Loaded:  # fmt: skip
    """new_experts, session: of experts that are computed otherwise than in plain torch."""
    checkpoint = open_checkpoint(folder, "auto", override_config)
    declared = checkpoint.declare()
    model = Decoder(declared.spec, reference(dtype, new_experts))
    load_weights(checkpoint, declared, dict(model.parameters()), lambda done, total: None)

    def make(limits: StepLimits, num_pages: int) -> Executor[Any]:
        caches = allocate_pool(
            declared.spec, num_pages, limits.page_tokens, dtype, sequences=limits.sequences + COPIES, kv=kv
        )
        return EagerExecutor(model, caches, limits.page_tokens, session)

    return Loaded(declared.spec, make, model)


def load_native(folder: Path, pool: Pool, kv: KvStorage | None = None, **override_config: object) -> Loaded:
    """Load in bfloat16 for the native kernels; see load_decoder."""
    checkpoint = open_checkpoint(folder, "auto", override_config)
    declared = checkpoint.declare()

    def make(limits: StepLimits, num_pages: int, **more: Any) -> Executor[Any]:
        pages = -(-limits.context_tokens // limits.page_tokens)
        recorder = Recorder(pool, Memory(pool, [None] * pool.nodes), limits.rows, limits.sequences, pages)
        model = Decoder(declared.spec, CpuOps(recorder).table())
        load_weights(checkpoint, declared, dict(model.parameters()), lambda done, total: None, pool)
        caches = allocate_pool(
            declared.spec, num_pages, limits.page_tokens, torch.bfloat16, sequences=limits.sequences + COPIES, kv=kv
        )
        return RecordedExecutor(model, recorder, caches, limits, **more)

    return Loaded(declared.spec, make)


def make_engine(
    model: Loaded,
    *,
    num_pages: int = 64,
    page_tokens: int = 4,
    max_running: int = 8,
    max_batch_tokens: int = 256,
    prefix_cache: bool = True,
) -> tuple[Engine, RecordingRunner]:
    allocator = PageAllocator(num_pages)
    limits = Limits(
        context_tokens=num_pages * page_tokens,
        page_tokens=page_tokens,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_queued=1000,
        max_queued_tokens=1_000_000,
    )
    steps = StepLimits(
        rows=max(max_batch_tokens, max_running), sequences=max_running, context_tokens=num_pages * page_tokens,
        page_tokens=page_tokens, head_rows=HEAD_ROWS,
    )  # fmt: skip
    runner = RecordingRunner(model.make(steps, num_pages))
    scheduler = Scheduler(limits, allocator, prefixes(model.spec, limits, allocator) if prefix_cache else None, RULES)
    return Engine(runner, scheduler, model.spec.vocab), runner


def run_step(executor: Executor[S], batch: StepBatch) -> S:
    """Launch a step, sample nothing, wait for it; its logits can be read afterwards."""
    step = executor.launch(batch)
    executor.sample(step, (), ())
    assert executor.wait(step).faults == {}
    return step


def prefixes(spec: Model, limits: Limits, allocator: PageAllocator, copies: int = COPIES) -> PrefixCache:
    return PrefixCache(
        limits.page_tokens, allocator, StateCopies(limits.max_running, copies) if spec.recurrent else None
    )


def request(request_id: str, tokens: list[int], max_tokens: int, **wishes: object) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, **{"temperature": 0.0, **wishes})
    return EngineRequest(id=request_id, tokens=tokens, sampling=sampling)


def finish_all(engine: Engine) -> dict[str, list[TokenEvent]]:
    """Step until no work is left; returns each request's events."""
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            events[event.id].append(event)
    engine.scheduler.check()
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [t for event in events for t in event.tokens]
