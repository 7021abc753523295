"""Overlap scheduling: an engine that launches every step ahead gives the same answers as one that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.random_requests import outcome, requests
from engines import COPIES, RULES, finish_all, load_decoder, prefixes, request, tokens_of
from proa.cache.pages import PageAllocator
from proa.cache.pool import allocate_pool
from proa.engine.engine import Engine
from proa.engine.executors.batch import StepBatch, StepResult
from proa.engine.executors.clock import Stage
from proa.engine.executors.eager import EagerExecutor, EagerStep, LikeGpu
from proa.engine.runner import Runner
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.scheduler import Scheduler
from proa.layers.decoder import Decoder
from proa.sampling.rows import Row
from proa.types import EngineRequest, TokenEvent
from tiny import TINY, make_tiny

pytestmark = pytest.mark.one_table
PAGE_TOKENS, CONTEXT = 4, 64


class FollowingExecutor(EagerExecutor):
    """Continues with tokens that have not reached the host, as a GPU does. `late`: rows sampled on the CPU, so
    that the next step continues with another token; `broken_at`: a position at which all logits are NaN."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, like=LikeGpu(overlap=True))
        self.late: Callable[[Row], bool] = lambda row: False
        self.broken_at = -1
        self.rows: list[int] = []  # one entry for each step launched ahead
        self.unread: list[EagerStep] = []  # launched, and neither waited for nor cancelled

    @property
    def follows(self) -> int:
        return len(self.rows)

    def launch(self, batch: StepBatch, after: EagerStep | None = None) -> EagerStep:
        if after is not None:
            self.rows.append(len(batch.spans))
        self.unread.append(super().launch(batch, after))
        return self.unread[-1]

    def sample(self, step: EagerStep, spans: Sequence[int], rows: Sequence[Row]) -> None:
        super().sample(step, spans, rows)
        for row, choice in zip(rows, step.choices, strict=True):
            choice.late = self.late(row)
            if len(row.tokens) == self.broken_at:
                choice.token, choice.logprob = -1, None

    def tokens_to_follow(self, step: EagerStep) -> list[int]:
        return [(c.token + 1) % self.spec.vocab if c.late else max(c.token, 0) for c in step.choices]

    def wait(self, step: EagerStep) -> StepResult:
        self.unread.remove(step)
        return super().wait(step)

    def cancel(self, step: EagerStep) -> None:
        self.unread.remove(step)
        super().cancel(step)


class Case:
    def __init__(self, decoder: Decoder, *, ahead: bool, num_pages: int = 48, max_running: int = 4) -> None:
        sequences = max_running + COPIES
        caches = allocate_pool(decoder.spec, num_pages, PAGE_TOKENS, torch.float32, sequences=sequences)
        self.executor = (FollowingExecutor if ahead else EagerExecutor)(decoder, caches, PAGE_TOKENS)
        limits = Limits(CONTEXT, PAGE_TOKENS, max_running, 32, 1000, 1_000_000)
        self.pages = PageAllocator(num_pages)
        scheduler = Scheduler(limits, self.pages, prefixes(decoder.spec, limits, self.pages), RULES)
        runner = Runner(self.executor)
        self.engine = Engine(runner, scheduler, decoder.spec.vocab)

    @property
    def follows(self) -> int:
        assert isinstance(self.executor, FollowingExecutor)
        return self.executor.follows


@pytest.fixture(scope="module", params=[name for name in ("qwen3-moe", "qwen3-next") if name in TINY])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    made = load_decoder(make_tiny(request.param, tmp_path_factory.mktemp("tiny"))).decoder
    assert made is not None
    return made


def answers(case: Case, asked: Sequence[EngineRequest]) -> dict[str, tuple[Any, ...]]:
    for one in asked:
        case.engine.submit(one)
    return {name: outcome(events) for name, events in finish_all(case.engine).items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_pages", [48, 14])
def test_overlap_gives_the_same_answers(seed: int, num_pages: int, decoder: Decoder) -> None:
    """Twice, so that the second time finds what the first has left in the prefix cache; with few pages some are
    preempted."""
    waits, hurries = Case(decoder, ahead=False, num_pages=num_pages), Case(decoder, ahead=True, num_pages=num_pages)
    asked = requests(seed, decoder.spec.vocab)
    for _ in range(2):
        want = answers(waits, asked)
        assert answers(hurries, asked) == want
        assert {finish for _, finish, _, _ in want.values()} == {"stop", "length"}
    assert hurries.follows > (20 if num_pages == 48 else 5)
    assert hurries.engine.stats().scheduler.cached_prompt_tokens > 0
    assert (
        (hurries.engine.stats().scheduler.preemptions > 0)
        == (waits.engine.stats().scheduler.preemptions > 0)
        == (num_pages == 14)
    )


@pytest.mark.parametrize("seed", range(3))
def test_late_tokens_are_recomputed(seed: int, decoder: Decoder) -> None:
    """Values computed from replaced tokens are recomputed, and are in no page of the prefix cache."""
    waits, hurries = Case(decoder, ahead=False), Case(decoder, ahead=True)
    executor = hurries.executor
    assert isinstance(executor, FollowingExecutor)
    executor.late = lambda row: len(row.tokens) % 3 == 0
    asked = requests(seed, decoder.spec.vocab)
    for _ in range(2):
        assert answers(hurries, asked) == answers(waits, asked)
    assert hurries.follows > 5


def test_steps_go_on_ahead_when_a_request_ends(decoder: Decoder) -> None:
    """Rows move up when the rows before them end."""
    counts, found = (16, 24, 12, 24, 20), []
    for ahead in (False, True):
        case = Case(decoder, ahead=ahead, max_running=5)
        asked = [request(f"r{i}", [5 + i, 9, 7], count) for i, count in enumerate(counts)]
        found.append(answers(case, asked))
        if isinstance(case.executor, FollowingExecutor):
            assert case.executor.rows == [5] * 11 + [4] * 4 + [3] * 4 + [2] * 3
    assert found[0] == found[1]
    assert [len(found[0][f"r{i}"][0]) for i in range(5)] == list(counts)


def test_an_abort_during_a_step_ahead_leaves_nothing(decoder: Decoder) -> None:
    case = Case(decoder, ahead=True)
    asked = [request(f"r{i}", [5 + i, 6, 7], 40) for i in range(3)]
    for one in asked:
        case.engine.submit(one)
    seen: list[TokenEvent] = []
    for step in range(30):
        if step == 10:
            case.engine.abort("r1")
        seen += [event for event in case.engine.step() if event.id == "r1"]
        case.engine.scheduler.check()
    assert len(seen) == 10
    assert all(event.finish is None for event in seen)
    alone = Case(decoder, ahead=False)
    for one in (asked[0], asked[2]):
        alone.engine.submit(one)
    want = finish_all(alone.engine)
    rest = finish_all(case.engine)
    assert all(tokens_of(want[name])[30:] == tokens_of(rest[name]) for name in ("r0", "r2"))
    stats = case.engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


def test_non_finite_logits_end_only_their_request(decoder: Decoder) -> None:
    """The next step was launched already, with an arbitrary token; its results are discarded."""
    case, asked = Case(decoder, ahead=True), [request("long", [5, 6, 7, 8, 9], 12), request("short", [5, 6], 12)]
    executor = case.executor
    assert isinstance(executor, FollowingExecutor)
    executor.broken_at = 15  # only the longer prompt reaches that position
    for one in asked:
        case.engine.submit(one)
    events = finish_all(case.engine)
    assert [e.finish for e in events["long"] if e.finish] == ["error"]
    assert len(tokens_of(events["long"])) == 10
    executor.broken_at = -1
    assert outcome(events["short"])[0][:12] == answers(Case(decoder, ahead=False), asked)["short"][0]
    stats = case.engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


def test_settle_cancels_the_step_in_flight(decoder: Decoder) -> None:
    case = Case(decoder, ahead=True)
    case.engine.submit(request("r", [5, 6], 30))
    for _ in range(5):
        case.engine.step()
    assert case.follows > 0
    case.engine.settle()
    assert case.executor.unread == []  # type: ignore[union-attr]


def test_overlapped_host_time_is_not_counted(decoder: Decoder) -> None:
    case = Case(decoder, ahead=True)
    case.engine.submit(request("r", [5, 6], 30))
    for _ in range(5):
        case.engine.step()
    before = case.engine.clock.seconds()
    case.engine.step()
    case.engine.clock.lap(Stage.PUBLISH)
    after = case.engine.clock.seconds()
    assert {stage for stage in Stage if after[stage] > before[stage]} == {Stage.PROGRAM}
    finish_all(case.engine)
    case.engine.clock.lap(Stage.PUBLISH)
    assert case.engine.clock.seconds()[Stage.PUBLISH] > after[Stage.PUBLISH]
