"""Engines whose prompts run beside decode steps, since the device gets all their experts. On a simulated GPU both are
computed one after the other, by the same engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.turn_cases import Case, case_of
from engines import finish_all, request, tokens_of
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.executor import Executor
from proa.native.pool import Pool
from proa.ops.caches import KvPages
from proa.types import TokenEvent
from tiny import make_tiny

pytestmark = pytest.mark.one_table
FAMILIES = ["qwen3-moe", "qwen3-next", "deepseek-v3"]
KINDS = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]
STREAM = Split(0.25, prefill="stream", ring_bytes=1 << 22, beside=True)
PAGE_TOKENS = 4


@dataclass(frozen=True)
class Size:
    """rows: of a chunk; passed: of a pass; long: tokens of a prompt in several chunks."""

    rows: int
    passed: int
    long: int


# Chunks of fewer rows than sizes.FEW_ROWS would share buffers with decode steps on a GPU. There a pass of the tiny
# model may end before the next decode step, so the order of both is that of a simulated one.
SIZES = {"sim": Size(16, 96, 70), "cuda": Size(144, 576, 432)}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


Make = Callable[..., "Beside"]


class Beside:
    """calls: of the executor, in order: a decode step, a look that may launch some of a pass, some of it in turns."""

    def __init__(self, case: Case, kept: Kept, size: Size) -> None:
        self.case, self.kept, self.size, self.calls = case, kept, size, list[str]()
        self._within = 0
        for name in ("launch", "keep_ahead", "advance"):
            self._note(name)

    def _note(self, name: str) -> None:
        call = getattr(self.case.executor, name)

        def noted(*args: Any, **more: Any) -> Any:
            if not self._within:  # a simulated device's keep_ahead calls advance
                self.calls.append(name)
            self._within += 1
            try:
                return call(*args, **more)
            finally:
                self._within -= 1

        setattr(self.case.executor, name, noted)

    @property
    def engine(self) -> Any:
        return self.case.engine

    def decode(self, count: int, tokens: int) -> list[TokenEvent]:
        for i in range(count):
            self.engine.submit(request(f"d{i}", prompt(3, i), tokens))
        events = [event for _ in range(4) for event in self.engine.step()]
        self.calls.clear()
        return events

    def all_free(self) -> bool:
        of = self.engine.stats().scheduler
        return bool(of.pages_free + of.pages_cached == of.pages_total)


@pytest.fixture(scope="module")
def make(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """make(kind, family, ...): an engine; the one before is closed."""
    folder, last = tmp_path_factory.mktemp("beside"), list[Kept]()

    def made(kind: str, family: str, split: Split = STREAM, **more: Any) -> Beside:
        path, size = folder / family, SIZES[kind]
        if not path.exists():
            make_tiny(family, path)
        while last:
            last.pop().close()
        loaded = load_split(path, pool, split, kind, keep=last)
        case = case_of(loaded, **{"rows": size.rows, "pass_rows": size.passed, "pages": 900} | more)
        return Beside(case, last[0], size)

    yield made
    while last:
        last.pop().close()


def prompt(count: int, first: int = 5) -> list[int]:
    return [(first + 7 * i) % 240 + 3 for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_turns(kind: str, family: str, make: Make) -> None:
    """Prompts come while others decode. While one is beside, a token of each other request comes in every step."""
    found = []
    for beside in (True, False):
        one = make(kind, family, replace(STREAM, beside=beside))
        if not beside:
            one.case.executor.runs_beside = lambda step: False  # type: ignore[method-assign]
        events = one.decode(3, 60)
        one.engine.submit(request("long", prompt(one.size.long), 9))
        one.engine.submit(request("next", prompt(one.size.long - 8, 9), 5))
        while one.engine.has_work:
            events += one.engine.step()
            one.engine.scheduler.check()
        assert ("keep_ahead" in one.calls) == beside
        assert one.kept.hybrid.streaming is not None
        assert not one.kept.hybrid.streaming.under_way
        assert one.all_free()
        found.append(
            {name: tokens_of([e for e in events if e.id == name]) for name in ("d0", "d1", "d2", "long", "next")}
        )
    got, want = found
    assert {name: len(tokens) for name, tokens in got.items()} == {name: len(tokens) for name, tokens in want.items()}
    assert got["long"][0] == want["long"][0]
    if kind == "sim":  # a row's bits do not depend on the step it is in
        assert got == want


@pytest.mark.parametrize("kind", KINDS)
def test_no_decode_step_waits_for_a_prompt_beside_it(kind: str, make: Make) -> None:
    """Each decode step is launched after two looks at the pass, whatever its length: between the steps, and during."""
    one = make(kind, "qwen3-moe")
    one.decode(2, 100)
    one.engine.submit(request("long", prompt(one.size.long), 3))
    while one.engine.scheduler.beside is None:
        one.engine.step()
    one.calls.clear()
    steps = 0
    while one.engine.scheduler.beside is not None:
        one.engine.step()
        steps += 1
    assert steps > (2 if kind == "sim" else 0)
    assert "advance" not in one.calls
    assert one.calls.count("launch") in (steps - 1, steps)
    if kind == "sim":
        launched = [i for i, call in enumerate(one.calls) if call == "launch"]
        assert {b - a for a, b in pairwise(launched)} <= {2, 3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_cancelled_prompt_leaves_the_next_one_right(kind: str, after: int, make: Make) -> None:
    one = make(kind, "qwen3-next")
    one.decode(2, 60)
    one.engine.submit(request("long", prompt(one.size.long), 5))
    while one.engine.scheduler.beside is None:
        one.engine.step()
    for _ in range(after):
        one.engine.step()
    assert "keep_ahead" in one.calls
    one.engine.abort("long")
    one.engine.step()
    assert one.engine.scheduler.beside is None
    one.engine.submit(request("next", prompt(one.size.long, 2), 5))
    events = finish_all(one.engine)
    assert "long" not in events
    assert one.all_free()
    plain = make(kind, "qwen3-next", replace(STREAM, beside=False))
    plain.engine.submit(request("next", prompt(one.size.long, 2), 5))
    assert tokens_of(finish_all(plain.engine)["next"])[0] == tokens_of(events["next"])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_prompt_overtakes_one_beside_decode(kind: str, make: Make) -> None:
    """In turns with decode, by the CPU; then the long one goes on beside."""
    one = make(kind, "qwen3-moe", over_rows=8)
    one.decode(2, 60)
    one.engine.submit(request("long", prompt(one.size.long), 4))
    until_the_prompt_is_under_way(one)
    one.engine.submit(request("short", prompt(7, 3), 4))
    events = []
    while one.engine.has_work:
        events += one.engine.step()
        one.engine.scheduler.check()
    named = [event.id for event in events if event.id in ("long", "short")]
    assert kind == "cuda" or named.index("short") < named.index("long")
    turns = [i for i, call in enumerate(one.calls) if call == "advance"]
    looks = [i for i, call in enumerate(one.calls) if call == "keep_ahead"]
    assert kind == "cuda" or looks[0] < turns[0] <= turns[-1] < looks[-1]
    for name, text in (("long", prompt(one.size.long)), ("short", prompt(7, 3))):
        plain = make(kind, "qwen3-moe", replace(STREAM, beside=False))
        plain.engine.submit(request(name, text, 4))
        assert tokens_of(finish_all(plain.engine)[name])[0] == tokens_of([e for e in events if e.id == name])[0]


def until_the_prompt_is_under_way(one: Beside) -> None:
    while not one.engine._turns.progress():
        if not one.engine.has_work:
            pytest.skip("the device computed the whole prompt within one decode step")
        one.engine.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["long", "d0"])
def test_nan_ends_only_its_request(kind: str, broken: str, make: Make) -> None:
    """Rows of both steps have the same numbers: their faults are noted apart. The prompt's come from cached keys."""
    one = make(kind, "qwen3-moe")
    one.engine.submit(request("first", prompt(PAGE_TOKENS * 4, 11), 2))
    finish_all(one.engine)
    one.decode(2, 60)
    one.engine.submit(request("long", [*prompt(PAGE_TOKENS * 4, 11), *prompt(one.size.long - 16)], 6))
    until_the_prompt_is_under_way(one)
    poison(one, broken)
    ends = {name: of[-1] for name, of in finish_all(one.engine).items()}
    assert {name for name, end in ends.items() if end.finish == "error"} == {broken}
    assert "NaN or infinity in layer" in (ends[broken].error or "")


def poison(one: Beside, name: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for (cache,) in one.case.executor.caches:
        if isinstance(cache, KvPages):
            cache.keys[one.engine.scheduler._requests[name].pages[:2]] = torch.nan
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_at_any_time_leave_nothing(kind: str, make: Make) -> None:
    """Long and short prompts, aborts and preemptions, with prompts beside decode: all answers end, no page is lost."""
    one = make(kind, "qwen3-next", over_rows=8, pages=SIZES[kind].long // 2 + 20)
    rng, waiting, alive = random.Random(3), 24, set[str]()
    lengths = (2, 6, one.size.long // 2, one.size.long)
    for step in range(3000):
        if waiting and (step % 3 == 0 or not one.engine.has_work):
            waiting -= 1
            alive.add(f"r{waiting}")
            one.engine.submit(request(f"r{waiting}", prompt(rng.choice(lengths), waiting), rng.randrange(20, 90)))
        if alive and rng.random() < 0.03:
            one.engine.abort(name := rng.choice(sorted(alive)))
            alive.discard(name)
        if not one.engine.has_work and not waiting:
            break
        for event in one.engine.step():
            assert event.finish != "error"
            if event.finish:
                alive.discard(event.id)
        one.engine.scheduler.check()
    assert not alive
    assert not one.engine.has_work
    assert "keep_ahead" in one.calls
    assert kind == "cuda" or one.engine.stats().scheduler.preemptions > 0
    assert one.all_free()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cancelled", [False, True])
def test_pcie_is_left_to_the_copies(kind: str, cancelled: bool, make: Make) -> None:
    """Decode steps beside a pass read no expert in place; those after it do again."""
    one = make(kind, "qwen3-moe", replace(STREAM, in_place=True))
    tables = one.kept.hybrid.tables
    assert tables is not None
    one.decode(2, 60)
    assert bool(tables._host_share.any())
    one.engine.submit(request("long", prompt(one.size.long), 5))
    while one.engine.scheduler.beside is None:
        one.engine.step()
    assert not bool(tables._host_share.any())
    assert not bool(tables._share.any())
    if cancelled:
        one.engine.abort("long")
    while one.engine.scheduler.beside is not None:
        one.engine.step()
    one.engine.step()
    assert bool(tables._share.any())
    finish_all(one.engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring", [1 << 22, 1 << 16])
def test_both_have_the_logits_of_one_after_the_other(kind: str, ring: int, pool: Pool, tmp_path: Path) -> None:
    """The pass and the decode steps during it: the same bits, also where experts pass in groups."""
    size, found = SIZES[kind], []
    limits = StepLimits(size.rows, 6, 1024, PAGE_TOKENS, 64, pass_rows=size.passed)
    folder = make_tiny("qwen3-moe", tmp_path)
    for beside in (False, True):
        keep: list[Kept] = []
        executor = load_split(folder, pool, replace(STREAM, ring_bytes=ring), kind, keep=keep).make(limits, 900)
        found.append(together(executor, size.long, beside))
        assert keep[0].hybrid.streaming is not None
        assert not keep[0].hybrid.streaming.under_way
        keep[0].close()
    for got, want in zip(*reversed(found), strict=True):
        assert torch.equal(got, want)


def together(executor: Executor[Any], count: int, beside: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a pass of `count` tokens, and of 40 decode steps of another sequence, the first of them during it."""
    jobs, decoded = executor.counters().jobs, []
    step = executor.launch_in_parts(StepBatch([Span(prompt(count), 0, list(range(200)), count, 0)]), 0.6)
    assert executor.runs_beside(step)
    while not beside and not executor.advance(step, 1):
        pass
    assert executor.counters().jobs == jobs, "the CPU has no part in it"
    done = not beside
    for position in range(40):
        done = done or executor.keep_ahead(step)
        of = executor.launch(StepBatch([Span([position % 7 + 5], position, list(range(300, 400)), 1, 1)]))
        executor.sample(of, (), ())
        done = done or executor.keep_ahead(step)
        assert executor.wait(of).faults == {}
        decoded.append(executor.logits_of(of, [0]).clone())
    while not done:
        done = executor.keep_ahead(step)
    executor.sample(step, (), ())
    assert executor.wait(step).faults == {}
    rows = range(count)
    logits = [executor.logits_of(step, rows[i : i + 64]).clone() for i in range(0, count, 64)]
    return torch.cat(logits), torch.cat(decoded)
