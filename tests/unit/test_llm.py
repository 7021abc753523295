"""AsyncLLM and LLM over a fake engine: defaults, limits, streams, n > 1, finish reasons, failures."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import FakeEngine, Reply, logprob_of, make_plan, make_tokenizer
from proa.blocking import LLM
from proa.config.options import EngineOptions, ModelOptions
from proa.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    QueueFull,
    RequestError,
    ShuttingDown,
    TokenizerError,
    UsageError,
)
from proa.llm import AsyncLLM
from proa.plan.plan import Plan
from proa.text.tokenizer import Tokenizer
from proa.types import Chat, Chunk, EngineRequest, SamplingParams, TokenEvent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_llm(tokenizer: Tokenizer) -> Callable[..., AsyncLLM]:
    def make(engine: FakeEngine, context_tokens: int = 100, **files: Any) -> AsyncLLM:
        return AsyncLLM(make_plan(context_tokens=context_tokens), engine, tokenizer, **files)

    return make


async def collect(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


def sampled(make_llm: Callable[..., AsyncLLM], params: SamplingParams, **files: Any) -> EngineRequest:
    """Generate with `params`; return the request that reached the engine."""
    engine = FakeEngine()
    asyncio.run(make_llm(engine, **files).generate("Hello", params))
    return engine.requests[0]


# ---- parameters and defaults ----


@pytest.mark.parametrize(
    ("generation_config", "params", "expected"),
    [
        ({}, {}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}),
        (
            {
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.1,
                "repetition_penalty": 1.05,
                "do_sample": True,
            },
            {},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05},
        ),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "top_k": 0}, {"temperature": 0.0, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.6}, {}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": None, "top_k": None}, {}, {"temperature": 1.0, "top_k": 0}),
        ({}, {"presence_penalty": 1.5, "logit_bias": {5: -3.0}}, {"presence_penalty": 1.5, "logit_bias": {5: -3.0}}),
    ],
)
def test_defaults_are_the_checkpoints_and_the_users_win(
    make_llm: Callable[..., AsyncLLM],
    generation_config: dict[str, Any],
    params: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    sampling = sampled(make_llm, SamplingParams(**params), generation_config=generation_config).sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize("value", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": 2.5}, {"top_k": True}])
def test_an_invalid_generation_config_is_a_config_error(
    make_llm: Callable[..., AsyncLLM], value: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        make_llm(FakeEngine(), generation_config=value)


def test_eos_ids_of_all_files_unless_ignored(make_llm: Callable[..., AsyncLLM]) -> None:
    files: dict[str, Any] = {"config": {"eos_token_id": 9}, "generation_config": {"eos_token_id": [7, 8]}}
    assert sampled(make_llm, SamplingParams(), **files).sampling.eos_token_ids == (2, 7, 8, 9)
    assert sampled(make_llm, SamplingParams(ignore_eos=True), **files).sampling.eos_token_ids == ()


@pytest.mark.parametrize(("asked", "room", "got"), [(None, 40, 40), (40, 40, 40), (1, 1, 1), (None, 1, 1)])
def test_max_tokens_fills_the_context(tokenizer: Tokenizer, asked: int | None, room: int, got: int) -> None:
    engine = FakeEngine()
    llm = AsyncLLM(make_plan(context_tokens=60 + room), engine, tokenizer)
    asyncio.run(llm.generate([5] * 60, SamplingParams(max_tokens=asked)))
    assert engine.requests[0].sampling.max_tokens == got


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "says", "param"),
    [
        (100, None, "101 tokens (100 in the prompt, 1 to generate). Shorten the prompt.", "prompt"),
        (150, 10, "160 tokens (150 in the prompt, 10 to generate). Shorten the prompt.", "prompt"),
        (60, 41, "101 tokens (60 in the prompt, 41 to generate). Lower max_tokens to 40", "max_tokens"),
    ],
)
def test_too_long_is_refused_with_numbers(
    make_llm: Callable[..., AsyncLLM], prompt_tokens: int, max_tokens: int | None, says: str, param: str
) -> None:
    engine = FakeEngine()
    llm = make_llm(engine)
    with pytest.raises(ContextLengthExceeded) as caught:
        llm.check([5] * prompt_tokens, SamplingParams(max_tokens=max_tokens))
    assert "This model's maximum context length is 100 tokens. However, you requested " + says in str(caught.value)
    assert caught.value.param == param
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(llm.generate([5] * prompt_tokens, SamplingParams(max_tokens=max_tokens)))
    assert engine.requests == []


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([5, 10**6], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5], {"stop_token_ids": (10**6,)}, "stop_token_ids"),
        ([5], {"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ([5], {"min_tokens": 100}, "min_tokens"),
    ],
)
def test_parameters_beyond_the_model_are_refused(
    make_llm: Callable[..., AsyncLLM], prompt: list[int], params: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        make_llm(FakeEngine()).check(prompt, SamplingParams(**params))
    assert caught.value.param == param


def test_siblings_share_a_group_and_have_seeds_of_their_own(make_llm: Callable[..., AsyncLLM]) -> None:
    seeds: list[list[int]] = []
    for seed in (41, 41, None, None, -1, 2**64 - 1):
        engine = FakeEngine()
        params = SamplingParams(n=3, seed=seed, prompt_logprobs=1)
        asyncio.run(make_llm(engine).generate("Hello", params, priority=-2, salt="team"))
        assert len({r.group for r in engine.requests}) == 1
        assert len({r.id for r in engine.requests}) == 3
        assert {(r.priority, r.salt) for r in engine.requests} == {(-2, "team")}
        assert [r.sampling.prompt_logprobs for r in engine.requests] == [1, None, None]
        seeds.append([r.sampling.seed for r in engine.requests])
    assert seeds[0] == seeds[1] == [41, 42, 43]
    assert len({*seeds[2], *seeds[3]}) == 6
    assert all(0 <= seed < 2**64 for row in seeds for seed in row)


# ---- streams ----


def test_the_answer_is_the_fold_of_the_stream(make_llm: Callable[..., AsyncLLM], tokenizer: Tokenizer) -> None:
    reply = Reply([*tokenizer.encode("Hi 😀 there. End"), 2], tokens_per_event=2, cached_tokens=3)
    params = SamplingParams(logprobs=2, prompt_logprobs=1, seed=1)
    prompt = tokenizer.encode("Say")

    async def both() -> tuple[list[Chunk], Any]:
        llm = make_llm(FakeEngine(reply))
        return await collect(llm.stream("Say", params)), await llm.generate("Say", params)

    chunks, answer = asyncio.run(both())
    assert "".join(c.text for c in chunks) == answer.text == "Hi 😀 there. End"
    choice = answer.choices[0]
    assert choice.tokens == [t for c in chunks for t in c.tokens] == list(reply.tokens[:-1])
    assert choice.logprobs == [logprob_of(t, 2) for t in choice.tokens]
    assert (choice.finish, choice.stop_reason) == ("stop", None)
    assert (answer.prompt_tokens, answer.cached_tokens) == (prompt, 3)
    assert answer.completion_tokens == len(choice.tokens)
    assert answer.prompt_logprobs == [None, *(logprob_of(t, 1) for t in prompt[1:])]


def test_a_prompt_may_be_changed_after_it_was_sent(make_llm: Callable[..., AsyncLLM], tokenizer: Tokenizer) -> None:
    """As by `prompt += answer.choices[0].tokens` for the next turn."""
    prompt = tokenizer.encode("Hello")

    async def work() -> Any:
        answer = await make_llm(FakeEngine()).generate(prompt)
        prompt.append(1)
        return answer

    assert asyncio.run(work()).prompt_tokens == tokenizer.encode("Hello")


def test_four_siblings_come_interleaved_and_fold_apart(make_llm: Callable[..., AsyncLLM], tokenizer: Tokenizer) -> None:
    texts = ["first 😀", "second one", "third", "fourth and last"]

    def reply(request: EngineRequest) -> Reply:
        return Reply(tokenizer.encode(texts[int(request.id[-1])]), delay_s=0.001)

    async def both() -> tuple[list[Chunk], Any]:
        llm = make_llm(FakeEngine(reply))
        params = SamplingParams(n=4, logprobs=0)
        return await collect(llm.stream("Hello", params)), await llm.generate("Hello", params)

    chunks, answer = asyncio.run(both())
    assert [c.text for c in answer.choices] == texts
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert {c.index for c in chunks[:4]} == {0, 1, 2, 3}  # no sequence waits for another to finish
    for index, text in enumerate(texts):
        own = [c for c in chunks if c.index == index]
        assert "".join(c.text for c in own) == text
        assert own[0].prompt_tokens == tokenizer.encode("Hello")
        assert [c.finish for c in own if c.finish] == ["stop"]
        assert own[-1].finish == "stop"


def test_a_stop_string_ends_the_engines_request(make_llm: Callable[..., AsyncLLM], tokenizer: Tokenizer) -> None:
    engine = FakeEngine(Reply(tokenizer.encode("one two three four five six")))
    answer = asyncio.run(make_llm(engine).generate("Count", SamplingParams(stop=("o thr", "six"))))
    assert (answer.text, answer.choices[0].finish, answer.choices[0].stop_reason) == ("one tw", "stop", "o thr")
    assert engine.aborted == [engine.requests[0].id]
    assert engine.in_flight == set()


@pytest.mark.parametrize("n", [1, 4])
def test_closing_a_stream_aborts_all_siblings(make_llm: Callable[..., AsyncLLM], tokenizer: Tokenizer, n: int) -> None:
    engine = FakeEngine(Reply(tokenizer.encode("a b c d e f g") * 5, delay_s=0.001))

    async def leave_early() -> None:
        async with aclosing(make_llm(engine).stream("Hello", SamplingParams(n=n))) as stream:
            async for _ in stream:
                break
        assert engine.in_flight == set()

    asyncio.run(leave_early())
    assert sorted(engine.aborted) == sorted(r.id for r in engine.requests)
    assert len(engine.aborted) == n


@pytest.mark.parametrize("n", [1, 3])
def test_cancelling_generate_aborts(make_llm: Callable[..., AsyncLLM], n: int) -> None:
    engine = FakeEngine(Reply([5] * 90, delay_s=0.01))

    async def cancel() -> None:
        task = asyncio.create_task(make_llm(engine).generate("Hello", SamplingParams(n=n)))
        while len(engine.in_flight) < n:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert engine.in_flight == set()
    assert len(engine.aborted) == n


@pytest.mark.parametrize("n", [1, 3])
def test_an_engine_that_dies_ends_the_stream_with_its_error(make_llm: Callable[..., AsyncLLM], n: int) -> None:
    def reply(request: EngineRequest) -> Reply:
        dies = request.id.endswith(f"-{n - 1}")
        return Reply([5] * 50, delay_s=0.001, error=EngineDead("killed by SIGKILL") if dies else None, error_after=2)

    engine = FakeEngine(reply)
    seen: list[Chunk] = []

    async def read() -> None:
        async with aclosing(make_llm(engine).stream("Hello", SamplingParams(n=n))) as stream:
            async for chunk in stream:
                seen.append(chunk)

    with pytest.raises(EngineDead, match="SIGKILL"):
        asyncio.run(read())
    assert seen
    assert engine.in_flight == set()


def test_refusals_come_through_and_end_the_siblings(make_llm: Callable[..., AsyncLLM]) -> None:
    engine = FakeEngine(Reply([5] * 50, delay_s=0.001), max_in_flight=2)
    with pytest.raises(QueueFull):
        asyncio.run(make_llm(engine).generate("Hello", SamplingParams(n=3)))
    assert engine.in_flight == set()


def test_a_stream_without_finish_is_an_error(make_llm: Callable[..., AsyncLLM]) -> None:
    class Silent(FakeEngine):
        async def generate(self, request: EngineRequest) -> AsyncIterator[TokenEvent]:
            yield TokenEvent(id=request.id, tokens=[5])

    with pytest.raises(EngineDead, match="without a finish reason"):
        asyncio.run(make_llm(Silent()).generate("Hello"))


def test_a_stopped_engine_ends_generate_with_an_error(make_llm: Callable[..., AsyncLLM]) -> None:
    engine = FakeEngine(Reply([5] * 90, delay_s=0.005))

    async def close_meanwhile() -> Any:
        llm = make_llm(engine)
        task = asyncio.create_task(llm.generate("Hello"))
        while not engine.in_flight:
            await asyncio.sleep(0.001)
        await llm.close()
        return await task

    with pytest.raises(EngineDead, match="stopped after"):
        asyncio.run(close_meanwhile())


def test_prompts_of_every_kind(make_llm: Callable[..., AsyncLLM], tokenizer: Tokenizer) -> None:
    llm = make_llm(FakeEngine())
    chat = Chat(messages=[{"role": "user", "content": "Hi"}])
    assert llm.tokenize("Hi") == tokenizer.encode("Hi")
    assert llm.tokenize([5, 6]) == [5, 6]
    assert llm.tokenize(chat) == tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# ---- LLM ----


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Callable[[FakeEngine], list[EngineOptions]]:
    """Make LLM(...) use the given engine instead of starting a process; return the list of options it was given."""

    def use(engine: FakeEngine) -> list[EngineOptions]:
        asked: list[EngineOptions] = []

        async def fake(model: str, options: EngineOptions, *, own_thread: bool) -> AsyncLLM:
            assert own_thread
            asked.append(options)
            return AsyncLLM(make_plan(max_running=2), engine, tokenizer)

        monkeypatch.setattr(AsyncLLM, "launch", fake)
        return asked

    return use


Launch = Callable[[FakeEngine], list[EngineOptions]]


def test_llm_answers_in_the_order_of_the_prompts(launch: Launch, tokenizer: Tokenizer) -> None:
    def reply(request: EngineRequest) -> Reply:
        return Reply(request.tokens, delay_s=0.02 / len(request.tokens))  # the first ones take longest

    engine = FakeEngine(reply)
    asked = launch(engine)
    prompts = [("word " * i).strip() for i in range(1, 12)]
    with LLM("demo", context=2048, ram="8GiB") as llm:
        assert [a.text for a in llm.generate(prompts)] == prompts
        assert llm.generate("one")[0].text == "one"
        assert llm.generate(tokenizer.encode("as tokens"))[0].text == "as tokens"
        params = [SamplingParams(max_tokens=i) for i in (1, 2)]
        assert [len(a.choices[0].tokens) for a in llm.generate(["one two three"] * 2, params)] == [1, 2]
        assert llm.generate([]) == []
        assert llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(skip_special_tokens=False)).text == (
            "<|im_start|>user\nHi"
        )
    assert (asked[0].cache.context, asked[0].machine.ram) == (2048, 8 * 2**30)
    assert engine.most_in_flight == 4  # 2 * max_running: the engine's queue never overflows
    assert engine.closed


def test_llm_raises_the_first_failure_and_ends_the_others(launch: Launch) -> None:
    def reply(request: EngineRequest) -> Reply:
        return Reply([5] * 50, delay_s=0.005, error=EngineDead("died") if len(request.tokens) == 2 else None)

    engine = FakeEngine(reply)
    launch(engine)
    with LLM("demo") as llm:
        with pytest.raises(EngineDead, match="died"):
            llm.generate([[5], [5, 6], [5, 6, 7]])
        assert engine.in_flight == set()
        with pytest.raises(UsageError, match="2 prompts but 3"):
            llm.generate([[5], [6]], [SamplingParams()] * 3)


def test_a_closed_llm_raises(launch: Launch) -> None:
    engine = FakeEngine()
    launch(engine)
    llm = LLM("demo")
    llm.close()
    llm.close()
    assert engine.closed
    with pytest.raises(ShuttingDown, match="closed"):
        llm.generate("Hello")


def test_llm_that_is_dropped_is_closed(launch: Launch) -> None:
    engine = FakeEngine()
    launch(engine)
    LLM("demo").generate("Hello")
    gc.collect()
    assert engine.closed
    assert "proa-llm" not in {thread.name for thread in threading.enumerate()}


def test_llm_raises_the_loading_error(launch: Launch) -> None:
    engine = FakeEngine(state="loading")
    engine.die(EngineDead("The engine process was killed by SIGKILL.", "Lower --context."))
    launch(engine)
    with pytest.raises(EngineDead, match=r"SIGKILL\. Lower --context"):
        LLM("demo")
    assert engine.closed
    assert "proa-llm" not in {thread.name for thread in threading.enumerate()}


def test_llm_names_a_misspelt_option() -> None:
    with pytest.raises(UsageError, match=r"contxt.*context"):
        LLM("demo", contxt=5)


def test_llm_works_inside_a_running_loop(launch: Launch) -> None:
    """A notebook runs such a loop."""
    launch(FakeEngine(Reply([5, 6])))

    async def notebook() -> list[int]:
        with LLM("demo") as llm:
            return llm.generate("Hello")[0].choices[0].tokens

    work: Coroutine[Any, Any, list[int]] = notebook()
    assert asyncio.run(work) == [5, 6]


def test_an_interrupt_cancels_what_runs(launch: Launch) -> None:
    def reply(request: EngineRequest) -> Reply:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return Reply([5] * 90, delay_s=0.05)

    engine = FakeEngine(reply)
    launch(engine)
    with LLM("demo") as llm, pytest.raises(KeyboardInterrupt):
        llm.generate("Hello")
    assert engine.in_flight == set()
    assert len(engine.aborted) == 1


# ---- launch ----


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, FakeEngine]:
    """A checkpoint folder to which every model name resolves, and the engine that `launch` returns."""
    folder, engine = make_tokenizer(tmp_path / "checkpoint"), FakeEngine()
    prepared = SimpleNamespace(
        plan=make_plan(context_tokens=77),
        checkpoint=SimpleNamespace(
            path=folder, config={"eos_token_id": 3}, generation_config={"top_k": 7, "eos_token_id": [4]}
        ),
        declared=SimpleNamespace(spec=SimpleNamespace(vocab=2000)),
    )

    async def start(plan: Plan, *, own_thread: bool, process: object, joins: bool) -> FakeEngine:
        assert not own_thread
        assert joins
        assert process == "process"
        return engine

    monkeypatch.setattr("proa.llm.prepare", lambda model, options, progress, when_measured: prepared)
    monkeypatch.setattr("proa.engine.processes.early.EngineProcess", lambda: "process")
    monkeypatch.setattr("proa.llm.EngineClient", SimpleNamespace(launch=start))
    return folder, engine


def test_launch_reads_what_the_checkpoint_says(found: tuple[Path, FakeEngine]) -> None:
    _, engine = found
    llm = asyncio.run(AsyncLLM.launch("demo"))
    assert (llm.engine, llm.context_tokens, llm.model_name) == (engine, 77, "fake")
    assert llm.sampling_defaults.top_k == 7
    llm.check([1999], SamplingParams())  # the model's vocabulary, not the tokenizer's
    asyncio.run(llm.generate([1999]))
    assert engine.requests[0].sampling.eos_token_ids == (2, 3, 4)


def test_launch_takes_another_tokenizer_and_template(found: tuple[Path, FakeEngine], tmp_path: Path) -> None:
    folder, _ = found
    for file in folder.iterdir():
        file.unlink()
    other = make_tokenizer(tmp_path / "other", chat_template=None)
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    asked = ModelOptions(tokenizer=str(other), chat_template=str(tmp_path / "t.jinja"))
    llm = asyncio.run(AsyncLLM.launch("demo", EngineOptions(model=asked)))
    assert llm.tokenizer.render(Chat(messages=[{"role": "user", "content": "Hi"}])) == "Hi!"
    with pytest.raises(TokenizerError, match="contains no tokenizer"):
        asyncio.run(AsyncLLM.launch("demo"))
