"""Random traffic through an engine with prompts in turns: every answer is whole, and no page stays allocated."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from engine.random_requests import outcome, requests
from engine.turn_cases import GRAPHS, KINDS, Case, case_of
from engines import Loaded, finish_all
from proa.engine.executors.executor import Pace
from proa.types import EngineRequest, TokenEvent


def traffic(model: Loaded, seed: int) -> list[EngineRequest]:
    """Prompts of one chunk and of several, some of better priority, some with log-probabilities of their tokens."""
    rng, found = Random(seed), []
    for i, one in enumerate(requests(seed, model.spec.vocab, 14)):
        longer = [rng.randrange(3, 250) for _ in range(rng.choice((0, 0, 40, 90)))]
        tokens = [*one.tokens, *longer]
        sampling = msgspec.structs.replace(one.sampling, prompt_logprobs=rng.choice((None, None, 1)))
        found.append(EngineRequest(id=f"r{i}", tokens=tokens, sampling=sampling, priority=rng.choice((0, 0, 0, -1))))
    return found


def run(case: Case, asked: list[EngineRequest], seed: int, leaving: frozenset[str]) -> dict[str, list[TokenEvent]]:
    """Run with arrivals between steps; the requests `leaving` are aborted at a random time."""
    rng, waiting = Random(seed), list(reversed(asked))
    events: dict[str, list[TokenEvent]] = {one.id: [] for one in asked}
    here: list[str] = []
    while waiting or case.engine.has_work:
        while waiting and rng.random() < 0.4:
            here.append(waiting[-1].id)
            case.engine.submit(waiting.pop())
        if here and rng.random() < 0.15 and (name := rng.choice(here)) in leaving:
            case.engine.abort(name)
        for event in case.engine.step():
            events[event.id].append(event)
        case.engine.scheduler.check()
    return events


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "pages"), [("qwen3-moe", 200), ("qwen3-next", 60)])
def test_random_traffic(kind: str, family: str, pages: int, seed: int, load: Callable[[str, str], Loaded]) -> None:
    check(kind, family, pages, seed, load)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize(("family", "pages", "seed"), [("qwen3-moe", 200, 0), ("qwen3-next", 60, 1)])
def test_blocks_as_graphs(kind: str, family: str, pages: int, seed: int, load: Callable[[str, str], Loaded]) -> None:
    check(kind, family, pages, seed, load)


def check(kind: str, family: str, pages: int, seed: int, load: Callable[[str, str], Loaded]) -> None:
    model, rng = load(kind, family), Random(seed)
    asked = traffic(model, seed)
    leaving = frozenset(one.id for one in asked if rng.random() < 0.3)
    case = case_of(model, pages=pages)
    pace = lambda: Pace(rng.random(), rng.random() * rng.choice((0.3, 1.0, 3.0)))  # noqa: E731
    case.executor.pace = pace  # type: ignore[method-assign]
    for turn in range(2):  # the second time with what the first one left in the prefix cache
        events = run(case, asked, seed + turn, leaving)
        stats = case.engine.stats()
        assert (stats.scheduler.running, stats.scheduler.waiting) == (0, 0)
        assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total
        whole = {name: of for name, of in events.items() if name not in leaving}
        assert {of[-1].finish for of in whole.values()} == {"stop", "length"}
        for one in asked:
            if one.id in whole and one.sampling.prompt_logprobs is not None:
                (told,) = [e.prompt_logprobs for e in whole[one.id] if e.prompt_logprobs is not None]
                assert len(told) == len(one.tokens)
        if kind == "torch":
            plain = case_of(model, turns=False)
            for one in asked:
                plain.engine.submit(one)
            want = {name: outcome(of) for name, of in finish_all(plain.engine).items()}
            assert {name: outcome(of) for name, of in whole.items()} == {name: want[name] for name in whole}
