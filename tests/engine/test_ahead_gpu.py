"""Overlap scheduling with CUDA graphs, whose tokens stay on the GPU: the bits of a GPU that waits for each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.split_cases import DRAWS
from engines import RULES, finish_all, prefixes, request, tokens_of
from hybrid_engines import Kept, Split, load_split
from proa.cache.pages import PageAllocator
from proa.engine.engine import Engine
from proa.engine.executors.batch import StepBatch, StepLimits
from proa.engine.runner import Runner
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.scheduler import Scheduler
from proa.native.pool import Pool
from proa.ops.caches import KvPages
from proa.types import EngineRequest, TokenEvent
from tiny import make_tiny

pytestmark = pytest.mark.gpu
PAGES, PAGE_TOKENS, RUNNING, ROWS = 200, 4, 9, 64


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"))


def engine_of(
    folder: Path, pool: Pool, split: Split, *, ahead: bool, keep: list[Kept] | None = None
) -> tuple[Engine, list[int]]:
    """An engine, and the sequences of each step launched ahead."""
    model = load_split(folder, pool, split, "cuda", keep=keep)
    limits = Limits(PAGES * PAGE_TOKENS, PAGE_TOKENS, RUNNING, ROWS, 1000, 1_000_000)
    executor = model.make(StepLimits(ROWS, RUNNING, PAGES * PAGE_TOKENS, PAGE_TOKENS, 64), PAGES)
    follows: list[int] = []
    launch = executor.launch

    def noted(batch: StepBatch, after: Any = None) -> Any:
        if after is not None:
            follows.append(len(batch.spans))
        return launch(batch, after)

    executor.launch = noted  # type: ignore[method-assign]
    allocator = PageAllocator(PAGES)
    scheduler = Scheduler(limits, allocator, prefixes(model.spec, limits, allocator), RULES)
    runner = Runner(executor, overlap=ahead)
    return Engine(runner, scheduler, model.spec.vocab), follows


def asked(count: int, tokens: int, **more: object) -> list[EngineRequest]:
    return [
        request(f"r{i}", [5 + i, 9, 7][: 1 + i % 3], tokens,
                **{"temperature": 1.0, "seed": i, **DRAWS[i % len(DRAWS)], **more})
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_overlap_gives_the_same_answers(share: float, count: int, pool: Pool, folder: Path) -> None:
    """All requests end together, so that both engines compute the same steps."""
    found = []
    for ahead in (False, True):
        engine, follows = engine_of(folder, pool, Split(share), ahead=ahead)
        for one in asked(count, 24, min_tokens=0, stop_token_ids=()):
            engine.submit(one)
        events = finish_all(engine)
        found.append({name: (tokens_of(of), [s for e in of for s in e.logprobs or []]) for name, of in events.items()})
        assert len(follows) == (22 if ahead else 0)
    assert found[0] == found[1]


def test_steps_go_on_ahead_when_a_request_ends(pool: Pool, folder: Path) -> None:
    """Rows move up when requests end, in the graph of eight sequences that all steps use in both engines."""
    found = []
    for ahead in (False, True):
        engine, follows = engine_of(folder, pool, Split(0.5), ahead=ahead)
        for i, count in enumerate((16, 24, 12, 24, 20, 24, 24, 24)):
            engine.submit(request(f"r{i}", [5 + i, 9, 7], count))
        found.append({name: tokens_of(events) for name, events in finish_all(engine).items()})
        assert [len(found[-1][f"r{i}"]) for i in range(8)] == [16, 24, 12, 24, 20, 24, 24, 24]
        assert follows == ([8] * 11 + [7] * 4 + [6] * 4 + [5] * 3 if ahead else [])
    assert found[0] == found[1]


@pytest.mark.parametrize("at", [3, 9])
def test_nan_ends_only_its_request(at: int, pool: Pool, folder: Path) -> None:
    """Keys of one request become NaN while another step is in flight, and rows move up after it."""
    whole = {}
    for poisoned in (False, True):
        engine, follows = engine_of(folder, pool, Split(0.5), ahead=True)
        for i in range(8):
            engine.submit(request(f"r{i}", [5 + i, 9, 7], 20 if i != 6 else at + 3))
        found: dict[str, list[TokenEvent]] = {f"r{i}": [] for i in range(8)}
        for step in itertools.count():
            if step == at and poisoned:
                poison(engine, "r2")
            for event in engine.step():
                found[event.id].append(event)
            if not engine.has_work:
                break
        ends = {name: events[-1].finish for name, events in found.items()}
        assert ends == {name: "error" if poisoned and name == "r2" else "length" for name in found}
        assert len(follows) > 15
        whole[poisoned] = {name: tokens_of(events) for name, events in found.items() if name != "r2"}
    assert whole[True] == whole[False]


def poison(engine: Engine, name: str) -> None:
    torch.cuda.synchronize()
    pages = engine.scheduler._requests[name].pages
    for (cache,) in engine.runner.executor.caches:  # type: ignore[attr-defined]
        if isinstance(cache, KvPages):
            cache.keys[pages] = torch.nan
    torch.cuda.synchronize()


def test_follow_up_prompts_reuse_what_was_computed_ahead(pool: Pool, folder: Path) -> None:
    """Pages, and copies of states taken between two steps in flight. All requests end together: the same steps."""
    found = []
    for ahead in (False, True):
        engine, follows = engine_of(folder, pool, Split(0.5), ahead=ahead)
        texts = {f"r{i}": [5 + i, 9, 7] for i in range(5)}
        for turn in range(3):
            for name, tokens in texts.items():
                engine.submit(request(f"{name} {turn}", tokens, 21))
            answers = {name.split()[0]: tokens_of(events) for name, events in finish_all(engine).items()}
            texts = {name: [*tokens, *answers[name], 11 + turn] for name, tokens in texts.items()}
        assert engine.stats().scheduler.cached_prompt_tokens == 5 * (
            20 + 44
        )  # of 25 and 47, by pages of what is computed
        assert (len(follows) > 40) == ahead
        found.append(texts)
    assert found[0] == found[1]


def test_no_step_ahead_of_cpu_sampled_tokens(pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU samples such a request's first token already, so no step goes ahead of it."""
    monkeypatch.setattr("proa.engine.executors.device_sampler.MOST_KEPT", 8)
    found = []
    for ahead in (False, True):
        engine, follows = engine_of(folder, pool, Split(0.5), ahead=ahead)
        engine.submit(request("r", [5, 9], 24, temperature=1.0, top_p=0.9, seed=4))
        found.append(tokens_of(finish_all(engine)["r"]))
        assert engine.stats().scheduler.generated_tokens == 24
        assert (len(follows), engine.stats().scheduler.steps) == (0, 24)
    assert found[0] == found[1]


def test_stops_aborts_and_arrivals_leave_nothing(pool: Pool, folder: Path) -> None:
    """Stop tokens, new requests and aborts at any time: no page or slot stays allocated."""
    engine, follows = engine_of(folder, pool, Split(0.5), ahead=True)
    sent = asked(40, 30, eos_token_ids=tuple(range(0, 400, 9)))
    finished: set[str | None] = {None}
    for step in range(2000):
        if step % 5 == 0 and sent:
            engine.submit(sent.pop())
        if step % 40 == 30:
            engine.abort(f"r{40 - step // 20}")
        if not engine.has_work and not sent:
            break
        events = engine.step()
        assert all(event.finish != "error" for event in events)
        finished |= {event.finish for event in events}
        engine.scheduler.check()
    assert not engine.has_work
    assert finished == {None, "stop", "length"}
    assert len(follows) > 50
    stats = engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


def test_experts_move_between_steps(pool: Pool, folder: Path) -> None:
    """Steps go ahead of each other only until an expert's copy has arrived, which is then put to use."""
    keep: list[Kept] = []
    engine, follows = engine_of(folder, pool, Split(0.5, inclusive=True, spare=1), ahead=True, keep=keep)
    for one in asked(4, 300, temperature=1.0, min_tokens=0, stop_token_ids=()):
        engine.submit(one)
    finish_all(engine)
    moves = keep[0].hybrid.moves
    assert moves is not None
    assert len(follows) > 100
    assert moves.moved.experts > 0
    keep[0].close()
