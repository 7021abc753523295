"""Engines whose prompts are computed between decode steps. Never: tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines import HEAD_ROWS, RULES, Loaded, load_decoder, load_native, prefixes, request
from hybrid_engines import Split, load_split
from proa.cache.pages import PageAllocator
from proa.engine.engine import Engine
from proa.engine.executors.batch import StepLimits
from proa.engine.executors.executor import Executor, Pace
from proa.engine.runner import Runner
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.request import Request
from proa.engine.scheduling.scheduler import Scheduler
from proa.engine.scheduling.step_plan import StepItem, StepPlan
from proa.engine.turns import PrefillTurns
from proa.machine.cost.turns import GapLimit
from proa.native.pool import Pool
from proa.types import TokenEvent
from tiny import make_tiny

PAGES, PAGE_TOKENS, RUNNING, ROWS = 200, 4, 5, 32


KINDS = ["torch", "native", "sim", pytest.param("cuda", marks=pytest.mark.gpu)]
# Prompts are streamed, and blocks are replayed as graphs: on a GPU, or with its executor on the CPU.
GRAPHS = ["host, graphs", pytest.param("cuda, graphs", marks=pytest.mark.gpu)]


@dataclass
class Case:
    engine: Engine
    executor: Executor[Any]
    model: Loaded

    @property
    def blocks(self) -> int:
        return len(self.model.spec.blocks)


def case_of(
    model: Loaded,
    *,
    turns: bool = True,
    durations: tuple[float, float] = (1.0, 1.0),
    pages: int = PAGES,
    rows: int = ROWS,
    over_rows: int = 0,
    pass_rows: int = 0,
) -> Case:
    """durations: of a decode step and of a prefill block, instead of measured ones. over_rows: most rows of a step that
    overtakes another one; they always may, but not two in succession. pass_rows: of a prefill step; 0: rows."""
    context = max(PAGES, pages) * PAGE_TOKENS
    limits = Limits(context, PAGE_TOKENS, RUNNING, rows, 1000, 1_000_000, pass_tokens=pass_rows)
    executor = model.make(
        StepLimits(rows, RUNNING, context, PAGE_TOKENS, HEAD_ROWS, pass_rows=pass_rows, over_rows=over_rows), pages
    )
    executor.pace = lambda: Pace(*durations)  # type: ignore[method-assign]
    allocator = PageAllocator(pages)
    scheduler = Scheduler(limits, allocator, prefixes(model.spec, limits, allocator), RULES, turns=turns)
    runner = Runner(executor)
    fixed = pass_rows > 0
    made = PrefillTurns(runner, GapLimit(factor=2.0), fixed=fixed, over_tokens=over_rows) if turns else None
    if made is not None:
        made.short_tokens = lambda: over_rows if len(made._held) == 1 else 0  # type: ignore[method-assign]
    engine = Engine(runner, scheduler, model.spec.vocab, turns=made)
    return Case(engine, executor, model)


def loader(pool: Pool, folder: Path) -> Callable[[str, str], Loaded]:
    """load(kind, family): a tiny model of this family for a kind of executor; checkpoints are made in `folder`."""

    def load(kind: str, family: str) -> Loaded:
        made = folder / family
        if not made.exists():
            made.mkdir()
            make_tiny(family, made)
        if kind == "torch":
            return load_decoder(made)
        if kind == "native":
            return load_native(made, pool)
        device, _, how = kind.partition(", ")
        split = Split(0.5, prefill="half", ring_bytes=1 << 22) if how else Split(0.5)
        return load_split(made, pool, split, device)

    return load


def prompt(count: int, first: int = 5) -> list[int]:
    return [(first + 7 * i) % 240 + 3 for i in range(count)]


def decode(case: Case, count: int, tokens: int) -> list[TokenEvent]:
    """Start `count` requests d0, d1... and run four decode steps."""
    for i in range(count):
        case.engine.submit(request(f"d{i}", prompt(3, i), tokens))
    return [event for _ in range(4) for event in case.engine.step()]


def planned(name: str, count: int) -> StepPlan:
    """A step of a whole prompt."""
    asked = Request(request(name, prompt(count), 5), context_tokens=64, page_tokens=PAGE_TOKENS)
    asked.pages, asked.state_slot = list(range(16)), 0
    return StepPlan((StepItem(asked, 0, count, True),))
