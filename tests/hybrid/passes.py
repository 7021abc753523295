"""Executors over tiny checkpoints that compute prompts in passes, and steps in parts. Never: tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.executor import Executor
from proa.native.pool import Pool
from teacher_forced import all_experts
from tiny import make_tiny

PAGE_TOKENS, CONTEXT, SEQUENCES = 4, 256, 6
DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]
FAMILIES = ["qwen3-moe", "qwen3-next", "deepseek-v3", "gpt-oss"]
FEW = dict.fromkeys(FAMILIES, 1 << 16) | {"gpt-oss": 1 << 18}  # bytes of rings that hold a part of a layer's experts
Load = Callable[..., Executor[Any]]


@contextmanager
def loader(pool: Pool, folder: Path) -> Iterator[Load]:
    """load(family, split, device, rows=..., keep=..., teams=..., every=...): an executor that computes up to `rows`
    rows at once, on the pool `teams` if it is given. every: tokens choose all experts. The one before is closed: RAM
    that is freed must not stay registered."""
    last = list[Kept]()

    def made(
        family: str, split: Split, device: str, *, rows: int, keep: list[Kept] | None = None, teams: Pool | None = None,
        every: bool = True,
    ) -> Executor[Any]:  # fmt: skip
        path = folder / family
        if not path.exists():
            make_tiny(family, path)
        while last:
            last.pop().close()
        override = all_experts(path) if every else {}
        model = load_split(path, teams or pool, split, device, keep=last, **override)
        limits = StepLimits(rows, SEQUENCES, CONTEXT, PAGE_TOKENS, head_rows=64, pass_rows=192)
        executor = model.make(limits, SEQUENCES * CONTEXT // PAGE_TOKENS)
        if keep is not None:
            keep += last
        return executor

    yield made
    while last:
        last.pop().close()


def spans(texts: list[list[int]], start: int = 0) -> list[Span]:
    pages = CONTEXT // PAGE_TOKENS
    return [
        Span(text[start:], start, list(range(i * pages, (i + 1) * pages)), len(text), i) for i, text in enumerate(texts)
    ]


def passed(executor: Executor[Any], batch: StepBatch, between: Callable[[], None] = lambda: None) -> Tensor:
    """Logits of all rows of a step in parts. between: called after each part."""
    step = executor.launch_in_parts(batch)
    while not executor.advance(step, 1):
        between()
    executor.sample(step, (), ())
    assert executor.wait(step).faults == {}
    rows = range(batch.num_tokens)
    return torch.cat([executor.logits_of(step, rows[i : i + 64]).clone() for i in range(0, len(rows), 64)])
