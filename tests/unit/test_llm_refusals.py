"""LLM and AsyncLLM: invalid arguments, requests that do not fit, failed answers, forks."""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from fakes import FakeEngine, Reply, make_plan, make_tokenizer
from proa.blocking import LLM
from proa.config.options import EngineOptions
from proa.errors import EngineDead, ProaError, RequestError, UsageError
from proa.llm import AsyncLLM
from proa.text.tokenizer import Tokenizer
from proa.types import Chat, Chunk, SamplingParams

HANG_SECONDS = 10
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Callable[..., LLM]:
    """Make an LLM over the given engine; `plan` replaces fields of the Plan."""

    def make(engine: FakeEngine, **plan: Any) -> LLM:
        async def fake(model: str, options: EngineOptions, *, own_thread: bool) -> AsyncLLM:
            assert own_thread
            return AsyncLLM(make_plan(**plan), engine, tokenizer)

        monkeypatch.setattr(AsyncLLM, "launch", fake)
        return LLM("demo")

    return make


def ask(tokenizer: Tokenizer, engine: FakeEngine, *args: Any, **keywords: Any) -> Any:
    return asyncio.run(AsyncLLM(make_plan(), engine, tokenizer).generate(*args, **keywords))


# ---- arguments ----


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "stop", "sampling_params"])
def test_chat_hands_no_sampling_parameter_to_the_template(make_llm: Callable[..., LLM], name: str) -> None:
    engine = FakeEngine()
    with make_llm(engine) as llm, pytest.raises(UsageError, match=f"{name}.*SamplingParams"):
        llm.chat(MESSAGES, **{name: 1})
    assert engine.requests == []


@pytest.mark.parametrize(
    ("keywords", "param"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": None}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"priority": 2**70}, "priority"),
        ({"salt": None}, "salt"),
        ({"salt": b"a"}, "salt"),
        ({"salt": "\ud800"}, "salt"),
        ({"params": {"n": 1}}, "params"),
        ({"params": {}}, "params"),
    ],
)
def test_values_the_engine_cannot_decode_are_refused(
    tokenizer: Tokenizer, keywords: dict[str, Any], param: str
) -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError) as caught:
        ask(tokenizer, engine, "Hello", **keywords)
    assert caught.value.param == param
    assert engine.requests == []


@pytest.mark.parametrize(
    "prompt",
    [None, b"abc", {"a": 1}, 5, [None], ["a"], [1.5], [True], Chat(messages=cast(Any, "hi")), Chat(messages=["hi"])],
)
def test_invalid_prompts_are_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError, match=r"str|int|dicts"):
        ask(tokenizer, engine, prompt)
    assert engine.requests == []


@pytest.mark.parametrize("prompts", [None, b"abc", {"a": 1}, 5, [None], [b"a"], ["a", [1.5]], [{"a": 1}], {"a"}])
def test_invalid_lists_of_prompts_are_refused(make_llm: Callable[..., LLM], prompts: Any) -> None:
    with make_llm(FakeEngine()) as llm, pytest.raises((RequestError, UsageError), match=r"str|int"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"n": 1}, {}, "abc", 5, [{"n": 1}], [None]])
def test_invalid_params_are_refused(make_llm: Callable[..., LLM], params: Any) -> None:
    with make_llm(FakeEngine()) as llm:
        with pytest.raises(UsageError, match="SamplingParams"):
            llm.generate(["a"], params)
        with pytest.raises(UsageError, match="SamplingParams"):
            llm.chat(MESSAGES, params)


@pytest.mark.parametrize("messages", ["hi", ["hi"], None, {"role": "user"}])
def test_chat_wants_messages(make_llm: Callable[..., LLM], messages: Any) -> None:
    with make_llm(FakeEngine()) as llm, pytest.raises(RequestError, match="messages"):
        llm.chat(messages)


def test_tuples_of_tokens_are_prompts(make_llm: Callable[..., LLM]) -> None:
    engine = FakeEngine()
    with make_llm(engine) as llm:
        llm.generate(cast(Any, [(5, 6)]))
        llm.generate(cast(Any, (5, 6)))
    assert [r.tokens for r in engine.requests] == [[5, 6]] * 2


def test_a_model_may_be_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def prepare(model: str, *_: object, **rest: object) -> None:
        asked.append(model)
        raise ProaError("Enough seen.")

    monkeypatch.setattr("proa.llm.prepare", prepare)
    with pytest.raises(ProaError, match="Enough seen"):
        LLM(Path("/models/a"))
    assert asked == ["/models/a"]


@pytest.mark.parametrize("model", [None, 5, b"demo"])
def test_a_model_that_is_no_name_is_refused(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr("proa.llm.prepare", lambda *_: pytest.fail("must not look for it"))
    with pytest.raises(UsageError, match=r"model.*str"):
        LLM(model)


# ---- places ----


@pytest.mark.parametrize(
    ("max_running", "max_queued", "n", "most"),
    [(4, 2, 1, 6), (4, 0, 1, 4), (1, 0, 1, 1), (2, 100, 1, 4), (4, 2, 3, 6), (4, 1, 5, 5), (2, 8, 6, 6)],
)
def test_llm_never_overflows_its_own_queue(
    make_llm: Callable[..., LLM], max_running: int, max_queued: int, n: int, most: int
) -> None:
    engine = FakeEngine(Reply([5, 6], delay_s=0.001), max_in_flight=max_running + max_queued)
    with make_llm(engine, max_running=max_running, max_queued=max_queued) as llm:
        assert len(llm.generate(["a"] * 20, SamplingParams(n=n))) == 20
    assert engine.most_in_flight == most


def test_more_choices_than_the_engine_holds_are_refused(tokenizer: Tokenizer) -> None:
    engine = FakeEngine()
    llm = AsyncLLM(make_plan(max_running=2, max_queued=3), engine, tokenizer)
    llm.check([5], SamplingParams(n=5))
    with pytest.raises(RequestError, match=r"n is 6.*at most 5.*2 running.*3 waiting") as caught:
        llm.check([5], SamplingParams(n=6))
    assert caught.value.param == "n"
    with pytest.raises(RequestError, match="at most"):
        asyncio.run(llm.generate([5], SamplingParams(n=6)))
    assert engine.requests == []


# ---- failed answers ----


@pytest.mark.parametrize(
    ("finish", "error", "says"), [("error", ProaError, "not finite"), ("abort", EngineDead, "stopped")]
)
def test_a_failed_answer_raises(
    make_llm: Callable[..., LLM], tokenizer: Tokenizer, finish: Any, error: type[ProaError], says: str
) -> None:
    engine = FakeEngine(Reply([5, 6], finish=finish))
    with make_llm(engine) as llm, pytest.raises(error, match=says):
        llm.generate(["a", "b"])

    async def stream() -> list[Chunk]:
        llm = AsyncLLM(make_plan(), FakeEngine(engine.reply), tokenizer)
        return [chunk async for chunk in llm.stream("a")]

    assert asyncio.run(stream())[-1].finish == finish


# ---- seeds, forks ----


def test_seeds_keep_64_bits(tokenizer: Tokenizer) -> None:
    seeds = []
    for seed in (7, 7 + 2**63, -7, 2**64 - 1):
        engine = FakeEngine()
        ask(tokenizer, engine, "a", SamplingParams(n=2, seed=seed))
        seeds.append([request.sampling.seed for request in engine.requests])
    assert seeds == [[7, 8], [7 + 2**63, 8 + 2**63], [2**64 - 7, 2**64 - 6], [2**64 - 1, 0]]


def test_a_forked_child_neither_hangs_nor_closes_its_parents_llm(make_llm: Callable[..., LLM]) -> None:
    engine = FakeEngine(Reply([5]))
    with make_llm(engine) as llm:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks in threaded programs, which is what is tested
            pid = os.fork()
        if pid == 0:
            _end_as_a_child(llm)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert llm.generate("a")[0].completion_tokens == 1


def _end_as_a_child(llm: LLM) -> None:
    """Run in the forked child; exit code 0 if using the LLM raised UsageError and closing it returned. SIGALRM ends a
    hang."""
    code = 1
    try:
        signal.alarm(HANG_SECONDS)
        try:
            llm.generate("a")
        except UsageError as error:
            code = 0 if "process" in str(error) else 2
        llm.close()
    finally:
        os._exit(code)
