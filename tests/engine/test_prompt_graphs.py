"""Whole steps with prompts: padded to a size, launched op by op at its first use and as a graph from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import load_decoder
from hybrid_engines import Split, load_split
from on_host import HostQueue, host_executor
from proa.cache.pool import allocate_pool
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.executor import Executor
from proa.native.pool import Pool
from proa.ops import sizes
from proa.sampling.rows import Row
from proa.types import Sampling
from tiny import make_tiny

PAGES, PAGE_TOKENS, RUNNING, ROWS = 64, 4, 3, 100
LIMITS = StepLimits(ROWS, RUNNING, 80, PAGE_TOKENS, 128, prompt_rows=sizes.prompt_rows(ROWS))
GREEDY = Sampling(max_tokens=1, temperature=0.0)
TEXTS = [torch.randint(3, 250, (80,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(RUNNING)]
# Of each step, (sequence, from, to) of its spans: sizes 32, 64 and none (70 and more rows), several prompts, prompts
# whose beginning is cached, and a decode step beside a prompt.
STEPS: list[list[tuple[int, int, int]]] = [
    [(0, 0, 20)], [(1, 0, 33)], [(0, 20, 21), (2, 0, 9)], [(0, 21, 50)], [(1, 33, 34), (0, 50, 79), (2, 9, 11)],
    [(2, 11, 80)], [(0, 0, 31), (1, 0, 31)], [(1, 31, 32), (0, 31, 32)],
]  # fmt: skip
Make = Callable[[StepLimits], Executor[Any]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-next", "deepseek-v2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["host", *(pytest.param(share, marks=pytest.mark.gpu) for share in (0.0, 0.5, 1.0))])
def make(request: pytest.FixtureRequest, folder: Path, pool: Pool) -> Make:
    """Makes executors of one model; on a GPU with this share of the experts in VRAM."""
    if request.param != "host":
        return lambda limits: load_split(folder, pool, Split(request.param), "cuda").make(limits, PAGES)
    decoder = load_decoder(folder, torch.bfloat16).decoder
    assert decoder is not None
    spec = decoder.spec
    return lambda limits: host_executor(
        decoder, allocate_pool(spec, PAGES, PAGE_TOKENS, torch.bfloat16, sequences=RUNNING), limits
    )


def logits(executor: Executor[Any], steps: Sequence[Sequence[tuple[int, int, int]]]) -> list[Tensor]:
    """Logits of all rows of each step. A round's first steps write all positions that later ones read."""
    found = []
    for parts in steps:
        spans = [Span(TEXTS[s][a:b], a, list(range(20 * s, 20 * s + 20)), 80, s) for s, a, b in parts]
        batch = StepBatch(spans, range(len(spans)))
        step = executor.launch(batch)
        executor.sample(step, batch.sampled, [Row(GREEDY, TEXTS[s], 80) for s, _, _ in parts])
        assert not executor.wait(step).faults
        found.append(executor.logits_of(step, range(batch.num_tokens)).clone().float())
    return found


def test_graphs_compute_what_single_launches_do(make: Make) -> None:
    """The first round launches ops, the others replay graphs: of the same kernels, so the bits are equal."""
    executor = make(LIMITS)
    first, second, third = (logits(executor, STEPS) for _ in range(3))
    for one, two, three in zip(first, second, third, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=0)
        torch.testing.assert_close(three, one, rtol=0, atol=0)
    alone = make(replace(LIMITS, prompt_rows=()))
    for padded, exact in zip(first, logits(alone, STEPS), strict=True):
        assert (padded - exact).norm() <= 0.02 * exact.norm()


def test_a_size_is_captured_when_it_comes_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load_decoder(folder, torch.bfloat16).decoder
    assert decoder is not None
    caches = allocate_pool(decoder.spec, PAGES, PAGE_TOKENS, torch.bfloat16, sequences=RUNNING)
    executor, captured, launched = host_executor(decoder, caches, LIMITS), list[object](), list[int]()
    capture, run = HostQueue.capture, executor._on.run
    monkeypatch.setattr(HostQueue, "capture", lambda queue, launch: captured.append(launch) or capture(queue, launch))
    monkeypatch.setattr(
        executor._on, "run", lambda inputs, rows, spans=(): launched.append(rows) or run(inputs, rows, spans)
    )
    logits(executor, [[(0, 0, 80)]])
    before = len(captured)
    for rows, new in ((20, 0), (32, 2), (7, 0), (33, 0), (64, 1), (40, 0), (65, 0)):  # two: with the pool's room
        logits(executor, [[(0, 0, rows)]])
        assert len(captured) - before == new, rows
        before = len(captured)
    assert launched == [80, 32, 32, 32, 64, 64, 64, 65]


def test_sizes() -> None:
    assert sizes.prompt_rows(ROWS) == (32, 64)
    assert sizes.prompt_rows(31) == ()
    assert sizes.prompt_rows(4096) == sizes.PROMPT_ROWS
