"""Beam search over HTTP, and from Python, with a scripted engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from fakes import FakeEngine, Reply, logprob_of, make_plan
from proa.errors import EngineDead, QueueFull, RequestError
from proa.llm import AsyncLLM
from proa.text.tokenizer import Tokenizer
from proa.types import EngineRequest, SamplingParams
from served import MODEL, Served
from server.http_calls import CHAT, COMPLETIONS, USER, check_shape, post

EOS = 2
PROMPT = [300, 301]
BEAMS = {"use_beam_search": True, "n": 2, "best_of": 3}


def reply(request: EngineRequest) -> Reply:
    """The most likely answer is 40, 50, end; each later alternative (41, 42, ...) is less likely by 1."""
    if request.tokens == PROMPT or request.tokens[-1] >= 300:
        return Reply([40])
    return Reply([50]) if 40 <= request.tokens[-1] < 50 else Reply([EOS])


def best_score(penalty: float) -> float:
    return sum(logprob_of(token, 0).logprob for token in (40, 50, EOS)) / 3**penalty


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def ask(tokenizer: Tokenizer, engine: FakeEngine, **params: Any) -> Any:
    llm = AsyncLLM(make_plan(), engine, tokenizer)
    return asyncio.run(llm.generate(PROMPT, SamplingParams(use_beam_search=True, **params)))


# ---- from Python ----


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_answers_come_best_first(tokenizer: Tokenizer, penalty: float) -> None:
    engine = FakeEngine(reply)
    answer = ask(tokenizer, engine, n=3, best_of=4, max_tokens=6, length_penalty=penalty, logprobs=2)
    first, *others = answer.choices
    assert (first.tokens, first.finish, first.stop_reason) == ([40, 50], "stop", None)
    assert first.text == tokenizer.decode([40, 50])
    assert first.score == pytest.approx(best_score(penalty))
    assert [entry.token for entry in first.logprobs] == [40, 50]
    assert [len(entry.top) for entry in first.logprobs] == [2, 2]
    scores = [choice.score for choice in answer.choices]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(choice.tokens) for choice in (first, *others)}) == 3
    assert len(engine.requests[0].tokens) == 2
    assert {request.sampling.max_tokens for request in engine.requests} == {1}
    assert not engine.in_flight


def test_stop_tokens_and_limits(tokenizer: Tokenizer) -> None:
    stopped = ask(tokenizer, FakeEngine(reply), best_of=2, stop_token_ids=(50,), max_tokens=9).choices[0]
    assert (stopped.tokens, stopped.finish, stopped.stop_reason) == ([40], "stop", 50)
    cut = ask(tokenizer, FakeEngine(reply), best_of=2, max_tokens=2).choices[0]
    assert (cut.tokens, cut.finish) == ([40, 50], "length")
    least = ask(tokenizer, FakeEngine(reply), best_of=2, min_tokens=3, max_tokens=3).choices[0]
    assert (len(least.tokens), least.finish) == (3, "length")
    on = ask(tokenizer, FakeEngine(reply), best_of=2, ignore_eos=True, max_tokens=3).choices[0]
    assert on.tokens == [40, 50, EOS]


def test_a_checkpoints_sampling_defaults_do_not_apply(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(reply)
    defaults = {"temperature": 0.6, "repetition_penalty": 1.5, "top_k": 3}
    llm = AsyncLLM(make_plan(), engine, tokenizer, generation_config=defaults)
    asyncio.run(llm.generate(PROMPT, SamplingParams(use_beam_search=True, best_of=2, max_tokens=2)))
    assert {(r.sampling.temperature, r.sampling.repetition_penalty, r.sampling.top_k) for r in engine.requests} == {
        (0.0, 1.0, 0)
    }


def test_a_full_queue_delays_later_steps_only(tokenizer: Tokenizer) -> None:
    with pytest.raises(QueueFull):
        ask(tokenizer, FakeEngine(reply, max_in_flight=0), max_tokens=2)
    engine = FakeEngine(reply, max_in_flight=1)
    assert ask(tokenizer, engine, best_of=2, max_tokens=4).choices[0].tokens == [40, 50]
    assert engine.most_in_flight == 1


def test_an_error_of_one_beam_ends_all(tokenizer: Tokenizer) -> None:
    def dies(request: EngineRequest) -> Reply:
        if request.tokens[-1] == 41:
            return Reply(error=EngineDead("The engine process died.", "See its log."))
        return Reply([50], delay_s=0.0 if request.tokens[-1] >= 300 else 30.0)

    def reply_or_die(request: EngineRequest) -> Reply:
        return Reply([40]) if request.tokens == PROMPT else dies(request)

    engine = FakeEngine(reply_or_die)
    with pytest.raises(EngineDead, match="died"):
        ask(tokenizer, engine, best_of=3, max_tokens=4)
    assert len(engine.aborted) == 2
    assert not engine.in_flight


@pytest.mark.parametrize(
    ("fits", "refused", "param"),
    [
        ({"best_of": 99}, {"best_of": 100}, "best_of"),  # and an eos token
        ({"n": 99}, {"n": 100}, "n"),
        ({"best_of": 97, "stop_token_ids": (7, 8)}, {"best_of": 98, "stop_token_ids": (7, 8)}, "best_of"),
        ({"best_of": 100, "ignore_eos": True}, {"best_of": 101, "ignore_eos": True}, "best_of"),
    ],
)
def test_the_number_of_beams_is_limited_by_the_logprobs(
    tokenizer: Tokenizer, fits: dict[str, Any], refused: dict[str, Any], param: str
) -> None:
    llm = AsyncLLM(make_plan(), FakeEngine(), tokenizer)
    llm.check(PROMPT, SamplingParams(use_beam_search=True, **fits))
    with pytest.raises(RequestError, match=param) as caught:
        llm.check(PROMPT, SamplingParams(use_beam_search=True, **refused))
    assert caught.value.param == param


# ---- over HTTP ----


def test_openais_client(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, reply) as served:
        extra = {"use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "early_stopping": False}
        answer = served.client.completions.create(
            model=MODEL, prompt=[PROMPT, [*PROMPT, 302]], n=2, temperature=0, logprobs=1, max_tokens=6, extra_body=extra
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.choices[0].text == answer.choices[2].text == tokenizer.decode([40, 50])
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.token_logprobs == [logprob_of(t, 0).logprob for t in (40, 50)]
        assert answer.usage is not None
        counts = [len(choice.logprobs.tokens or []) for choice in answer.choices if choice.logprobs is not None]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, sum(counts))

        said = served.client.chat.completions.create(
            model=MODEL, messages=USER, n=2, max_tokens=6, logprobs=True, extra_body={**extra, "return_token_ids": True}
        )
        assert len(said.choices) == 2
        for choice in said.choices:
            assert choice.message.content == tokenizer.decode(choice.model_extra.get("token_ids", []))
        assert served.engine.aborted == []


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0.5}, "temperature"),
    "top_p": ({"top_p": 0.5}, "top_p"),
    "top_k": ({"top_k": 5}, "top_k"),
    "min_p": ({"min_p": 0.1}, "min_p"),
    "presence_penalty": ({"presence_penalty": 1}, "presence_penalty"),
    "frequency_penalty": ({"frequency_penalty": 1}, "frequency_penalty"),
    "repetition_penalty": ({"repetition_penalty": 1.1}, "repetition_penalty"),
    "seed": ({"seed": 0}, "seed"),
    "logit_bias": ({"logit_bias": {"5": 1}}, "logit_bias"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "regex": ({"regex": "a+"}, "regex"),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "stop": ({"stop": "x"}, "stop"),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    "stream": ({"stream": True}, "stream"),
    "fewer beams than answers": ({"n": 4, "best_of": 3}, "best_of"),
    "too many beams": ({"best_of": 129}, "best_of"),
    "no beams": ({"n": 1, "best_of": 0}, "best_of"),
    "penalty": ({"length_penalty": 11}, "length_penalty"),
    "never": ({"early_stopping": "never"}, "early_stopping"),
    "best_of without beams": ({"use_beam_search": False}, "best_of"),
    "length_penalty without beams": ({"use_beam_search": False, "n": 3, "length_penalty": 2}, "length_penalty"),
    "early_stopping without beams": ({"use_beam_search": None, "n": 3, "early_stopping": True}, "early_stopping"),
}


@pytest.mark.parametrize("name", CONFLICTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_conflicting_fields_are_refused_by_name(tokenizer: Tokenizer, path: str, name: str) -> None:
    fields, param = CONFLICTS[name]
    body = {"messages": USER} if path == CHAT else {"prompt": "a"}
    response = post(tokenizer, path, json={**body, **BEAMS, **fields})
    assert response.status_code == 400
    error = check_shape(response)
    assert error["param"] == param
    assert param in error["message"]


def test_a_budget_of_reasoning_is_refused_by_name(tokenizer: Tokenizer) -> None:
    response = post(tokenizer, CHAT, json={"messages": USER, **BEAMS, "thinking_token_budget": 5})
    assert (response.status_code, check_shape(response)["param"]) == (400, "thinking_token_budget")


def test_neutral_values_pass(tokenizer: Tokenizer) -> None:
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1}
    body = {"messages": USER, **BEAMS, **neutral, "logit_bias": {}, "stop": [], "max_tokens": 4}
    response = post(tokenizer, CHAT, FakeEngine(reply), json=body, options={"strict": True})
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 2


def test_fields_of_one_endpoint(tokenizer: Tokenizer) -> None:
    echo = post(tokenizer, COMPLETIONS, json={"prompt": "a", **BEAMS, "echo": True, "logprobs": 1})
    assert (echo.status_code, check_shape(echo)["param"]) == (400, "echo")
    echoed = post(tokenizer, COMPLETIONS, FakeEngine(reply), json={"prompt": "Hello", **BEAMS, "echo": True})
    assert all(choice["text"].startswith("Hello") for choice in echoed.json()["choices"])
    tools = [{"type": "function", "function": {"name": "f"}}]
    forced = post(tokenizer, CHAT, json={"messages": USER, **BEAMS, "tools": tools, "tool_choice": "required"})
    assert (forced.status_code, check_shape(forced)["param"]) == (400, "tool_choice")
    many = post(tokenizer, COMPLETIONS, json={"prompt": ["a"] * 100, **BEAMS})
    assert (many.status_code, check_shape(many)["param"]) == (400, "prompt")


def test_disconnect_aborts_the_beams(tokenizer: Tokenizer) -> None:
    openai = pytest.importorskip("openai")

    def slow(request: EngineRequest) -> Reply:
        first = reply(request)
        return first if request.tokens[-1] >= 300 else Reply(first.tokens, delay_s=5.0)

    with Served(tokenizer, slow) as served:
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=0.5).completions.create(model=MODEL, prompt=PROMPT, extra_body=BEAMS)
        assert wait_for(lambda: len(served.engine.aborted) == 3, seconds=2.0)
        assert not served.engine.in_flight
