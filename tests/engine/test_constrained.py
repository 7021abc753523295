"""Engines whose requests have constraints: beside free ones, with overlap, preemptions, prefix hits and on a GPU's
executor."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.random_requests import WISHES, outcome
from engines import COPIES, RULES, finish_all, load_decoder, prefixes, request, tokens_of
from grammars import EOS, matcher, text_of, thinker
from proa.cache.pages import PageAllocator
from proa.cache.pool import allocate_pool
from proa.engine.engine import Engine
from proa.engine.executors.batch import StepLimits
from proa.engine.executors.eager import EagerExecutor, LikeGpu
from proa.engine.executors.executor import Executor
from proa.engine.runner import Runner
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.scheduler import Scheduler
from proa.engine.turns import PrefillTurns
from proa.errors import RequestError
from proa.layers.decoder import Decoder
from proa.machine.cost.turns import GapLimit
from proa.types import Constraint, EngineRequest, Thinking
from tiny import make_tiny

PAGE_TOKENS, RUNNING, ROWS, CONTEXT, VOCAB = 4, 4, 32, 96, 256
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 30]}, "b": {"type": "string", "maxLength": 3}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
JSON, CHOICES = Constraint.json(SCHEMA), ["yes", "no", "hello there"]
CHOICE = Constraint.choice(CHOICES)


def load(dtype: torch.dtype, folder: Path) -> Decoder:
    made = load_decoder(make_tiny("qwen3-moe", folder), dtype).decoder
    assert made is not None
    return made


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(torch.float32, tmp_path_factory.mktemp("tiny"))


def executor_of(decoder: Decoder, kind: str, num_pages: int) -> Executor[Any]:
    dtype = decoder.norm.norm.weight.dtype
    caches = allocate_pool(decoder.spec, num_pages, PAGE_TOKENS, dtype, sequences=RUNNING + COPIES)
    if kind != "graphs":
        return EagerExecutor(decoder, caches, PAGE_TOKENS, like=LikeGpu(overlap=kind == "overlap"))
    on_host = importlib.import_module("on_host")  # needs Triton
    limits = StepLimits(ROWS, RUNNING, CONTEXT, PAGE_TOKENS, 64)
    executor: Executor[Any] = on_host.host_executor(decoder, caches, limits)
    return executor


def engine_of(decoder: Decoder, kind: str = "eager", *, num_pages: int = 100, turns: bool = False) -> Engine:
    limits = Limits(CONTEXT, PAGE_TOKENS, RUNNING, ROWS, 1000, 1_000_000)
    pages = PageAllocator(num_pages)
    scheduler = Scheduler(limits, pages, prefixes(decoder.spec, limits, pages), RULES, turns=turns)
    runner = Runner(executor_of(decoder, kind, num_pages))
    return Engine(
        runner, scheduler, decoder.spec.vocab, turns=PrefillTurns(runner, GapLimit(factor=2.0)) if turns else None
    )


def constrained(name: str, prompt: list[int], constraint: Constraint, **wishes: Any) -> EngineRequest:
    return request(name, prompt, wishes.pop("max_tokens", 40), constraint=constraint, eos_token_ids=(EOS,), **wishes)


def submit(engine: Engine, asked: EngineRequest) -> None:
    s = asked.sampling
    stops = (*s.eos_token_ids, *s.stop_token_ids)
    if s.thinking is not None:
        engine.submit(asked, thinker(s.thinking, s.constraint, min_tokens=s.min_tokens, num_tokens=VOCAB))
    elif s.constraint is not None:
        engine.submit(asked, matcher(s.constraint, min_tokens=s.min_tokens, stops=stops, num_tokens=VOCAB))
    else:
        engine.submit(asked)


def answers(engine: Engine, asked: Sequence[EngineRequest]) -> dict[str, tuple[Any, ...]]:
    for one in asked:
        submit(engine, one)
    return {name: outcome(events) for name, events in finish_all(engine).items()}


def mixed(seed: int) -> list[EngineRequest]:
    """Free and constrained requests with common beginnings, greedy and random, with penalties and logprobs."""
    draw = Random(seed)
    stem = [draw.randrange(VOCAB) for _ in range(12)]
    found = []
    for i in range(9):
        prompt, wishes = [*stem[: draw.randrange(1, 12)], 7, i], draw.choice(WISHES)
        if i % 3 == 2:
            found.append(request(f"free{i}", prompt, 15, **wishes))
        else:
            chosen = (JSON, CHOICE)[i % 3]
            found.append(constrained(f"{chosen.kind}{i}", prompt, chosen, min_tokens=draw.choice([0, 3]), **wishes))
    return found


def check(name: str, found: tuple[Any, ...]) -> None:
    tokens, finish, stop, _ = found
    if name.startswith("free"):
        assert (len(tokens), finish) == (15, "length")
        return
    if finish == "length":
        assert len(tokens) == 40
        return
    assert (finish, stop) == ("stop", EOS)
    if name.startswith("choice"):
        assert text_of(tokens) in CHOICES
    else:
        value = json.loads(text_of(tokens))
        assert set(value) == {"a", "b", "c"}
        assert value["a"] in (1, 2, 30)
        assert len(value["b"]) <= 3


@pytest.mark.parametrize("num_pages", [100, 26])
def test_constrained_beside_free_requests(num_pages: int, decoder: Decoder) -> None:
    """With few pages requests are preempted; the second round begins with prefixes from the cache."""
    plain, other = engine_of(decoder), engine_of(decoder, "overlap", num_pages=num_pages)
    for seed in range(2):
        asked = mixed(seed)
        want = answers(plain, asked)
        for name, found in want.items():
            check(name, found)
        assert {found[1] for found in want.values()} == {"stop", "length"}
        assert answers(other, asked) == want
    stats = other.stats().scheduler
    assert (stats.preemptions > 0) == (num_pages == 26)
    assert stats.cached_prompt_tokens > 0


def test_constrained_answers_do_not_depend_on_others(decoder: Decoder) -> None:
    asked = mixed(5)
    together = answers(engine_of(decoder), asked)
    assert together == {one.id: answers(engine_of(decoder), [one])[one.id] for one in asked}


def test_on_the_executor_of_a_gpu(tmp_path: Path) -> None:
    """Masks reach the sampling kernels, also those of a step that was launched ahead."""
    pytest.importorskip("triton")
    engine = engine_of(load(torch.bfloat16, tmp_path), "graphs")
    asked = [
        constrained("choice1", [5, 6], CHOICE),
        constrained("json", [7, 9], JSON, temperature=1.0, seed=1, top_k=4),
        constrained("choice2", [8], CHOICE, temperature=0.7, logprobs=1),
        request("free0", [5, 6], 15),
    ]
    for name, found in answers(engine, asked).items():
        check(name, found)


def test_prefill_beside_decode(decoder: Decoder) -> None:
    engine = engine_of(decoder, turns=True)
    submit(engine, constrained("json1", [5, 6], JSON, temperature=1.0, seed=4))
    for _ in range(3):
        engine.step()
    submit(engine, constrained("json2", list(range(30)), JSON, temperature=1.0, seed=5))
    for name, events in finish_all(engine).items():
        assert events[-1].finish in ("stop", "length"), name


def test_the_grammar_begins_after_the_reasoning(decoder: Decoder) -> None:
    engine = engine_of(decoder, "overlap")
    thinking = Thinking(is_open=True, opening="", end="\x05")
    asked = constrained("json", [9, 8], JSON, thinking=thinking, temperature=1.0, seed=2, max_tokens=90)
    submit(engine, asked)
    text = tokens_of(finish_all(engine)["json"])
    assert EOS not in text
    if 5 in text:
        begin = text.index(5) + 1
        assert text[begin : begin + 1] in ([ord("{")], [0xC0])


@pytest.mark.parametrize("kind", ["eager", "overlap", "graphs"])
def test_budgets_of_reasoning(kind: str, decoder: Decoder, tmp_path: Path) -> None:
    """Beside free requests, preempted ones too: the closing tokens come exactly when the budget is spent."""
    if kind == "graphs":
        pytest.importorskip("triton")
        decoder = load(torch.bfloat16, tmp_path)
    closing = (9, 8, 5)
    asked = [
        request(
            f"budget{i}", [5, 6, i], 24, temperature=i % 2, seed=i,
            thinking=Thinking(is_open=True, opening="", end="\x05", budget=4 + i, closing=closing),
        )
        for i in range(5)
    ]  # fmt: skip
    found = answers(
        engine_of(decoder, kind, num_pages=100 if kind == "graphs" else 26), [*asked, request("free0", [5], 15)]
    )
    for i in range(5):
        tokens = found[f"budget{i}"][0]
        if 5 not in tokens[: 4 + i]:
            assert tuple(tokens[4 + i : 7 + i]) == closing
    assert any(5 not in found[f"budget{i}"][0][: 4 + i] for i in range(5))


def test_a_cut_answer_ends_with_length(decoder: Decoder) -> None:
    engine = engine_of(decoder)
    found = answers(engine, [constrained("cut", [5], JSON, max_tokens=4)])["cut"]
    assert (len(found[0]), found[1]) == (4, "length")


def test_log_probabilities_are_the_models_own(decoder: Decoder) -> None:
    """The first token's alternatives are those of the same prompt without a constraint."""
    engine = engine_of(decoder)
    submit(engine, constrained("json", [5, 6, 7], JSON, logprobs=5))
    submit(engine, request("free", [5, 6, 7], 1, logprobs=5))
    events = finish_all(engine)
    mine, theirs = (events[name][0].logprobs for name in ("json", "free"))
    assert mine is not None
    assert theirs is not None
    assert mine[0].token in (ord("{"), 0xC0)
    assert [token for token, _ in mine[0].top] == [token for token, _ in theirs[0].top]


def test_a_fault_of_the_grammar_ends_only_its_request(decoder: Decoder) -> None:
    engine = engine_of(decoder, "overlap")
    stuck = constrained("stuck", [5], Constraint.regex("ab"), stop_token_ids=(ord("b"),))
    submit(engine, stuck)
    submit(engine, request("free", [5, 6], 10))
    events = finish_all(engine)
    assert events["stuck"][-1].finish == "error"
    assert "leave no token" in events["stuck"][-1].error
    assert len(tokens_of(events["free"])) == 10


def test_an_answer_that_could_not_end_is_refused(decoder: Decoder) -> None:
    endless = request("endless", [5], 10, constraint=CHOICE)
    with pytest.raises(RequestError, match="could not end"):
        submit(engine_of(decoder), endless)
