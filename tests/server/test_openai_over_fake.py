"""OpenAI's client against a real server with a scripted engine."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fakes import Reply
from proa.errors import EngineDead
from proa.server.logprobs import CompletionLogprobsWriter
from proa.text.tokenizer import Tokenizer
from proa.types import EngineRequest
from served import MODEL, Served

openai = pytest.importorskip("openai")

USER = [{"role": "user", "content": "Tell me about proas."}]
STORY = "The quick brown fox 🦊 jumps over the lazy dog; 你好, wörld! 👩‍👩‍👧 done."


def says(tokenizer: Tokenizer, text: str, **script: Any) -> Reply:
    return Reply(tokenizer.encode(text), **script)


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with Served(tokenizer, says(tokenizer, STORY), accept_any_model=False) as server:
        yield server


def wait_for(condition: Any, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def test_chat_answer(served: Served) -> None:
    answer = served.client.chat.completions.create(model=MODEL, messages=USER, seed=1, temperature=0)
    tokens = served.tokenizer.encode(STORY)
    prompt = served.engine.requests[-1].tokens
    assert answer.choices[0].message.content == STORY
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(tokens))
    assert answer.usage.total_tokens == len(prompt) + len(tokens)
    assert served.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nTell me about proas.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_stream_adds_up(served: Served) -> None:
    options = {"include_usage": True}
    chunks = list(
        served.client.chat.completions.create(model=MODEL, messages=USER, stream=True, stream_options=options)
    )
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(served.tokenizer.encode(STORY))
    assert all(piece.usage is None for piece in pieces)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == STORY
    assert all("\ufffd" not in (piece.choices[0].delta.content or "") for piece in pieces)
    assert [p.choices[0].finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert len({piece.id for piece in chunks}) == 1


def test_no_usage_unless_asked(served: Served) -> None:
    with served.client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=USER, stream=True
    ) as response:
        text = response.read().decode()
    assert "usage" not in text
    assert text.endswith("data: [DONE]\n\n")


def test_continuous_usage(served: Served) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = served.client.completions.create(
        model=MODEL, prompt="a", max_tokens=5, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 5


def test_n_choices(served: Served) -> None:
    answer = served.client.chat.completions.create(model=MODEL, messages=USER, n=4, max_tokens=6, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    last = served.engine.requests[-4:]
    assert answer.usage.prompt_tokens == len(last[0].tokens)
    assert len({request.group for request in last}) == 1
    assert len({request.sampling.seed for request in last}) == 4


def test_chat_logprobs_agree_with_tokens(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    tokens = served.tokenizer.encode(STORY)
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == tokens
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == STORY
    for token, entry in zip(tokens, choice.logprobs.content, strict=True):
        assert entry.logprob == -(token % 7 + 1) / 8
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.token == served.tokenizer.token_text(token)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_tokens(served: Served, stream: bool) -> None:
    answer = served.client.chat.completions.create(
        model=MODEL, messages=USER, stop=["n fox 🦊 jum", "never"], stream=stream
    )
    if stream:
        pieces = list(answer)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        last = pieces[-1].choices[0]
    else:
        text, last = answer.choices[0].message.content, answer.choices[0]
    assert text == "The quick brow"
    assert last.finish_reason == "stop"
    assert last.model_extra["stop_reason"] == "n fox 🦊 jum"
    assert wait_for(lambda: not served.engine.in_flight)


PLAIN_AND_STREAMED: dict[str, dict[str, Any]] = {
    "chat": {"messages": USER, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    "chat with a stop string": {"messages": USER, "stop": "lazy", "include_stop_str_in_output": True},
    "completions": {"prompt": ["a 🦊", "b"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 30},
    "completions with ids": {"prompt": [[5, 6], [7]], "prompt_logprobs": 1, "return_token_ids": True},
}


@pytest.mark.parametrize("name", PLAIN_AND_STREAMED)
def test_stream_adds_up_to_the_plain_answer(served: Served, name: str) -> None:
    """Accumulates the events by the protocol's rules, independently of the server's fold."""
    body = {"seed": 5, **PLAIN_AND_STREAMED[name]}
    url = f"{served.url}/v1/chat/completions" if "messages" in body else f"{served.url}/v1/completions"
    plain = httpx.post(url, json=body).json()
    streamed = httpx.post(url, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            add_up(choices.setdefault(piece["index"], {}), piece)
    for choice in plain["choices"]:
        whole = dict(choice)
        whole["text"] = whole.pop("message")["content"] if "message" in whole else whole["text"]
        whole = {key: value for key, value in whole.items() if value is not None}
        assert whole == {key: value for key, value in choices[choice["index"]].items() if value is not None}
    assert events[-1]["usage"] == plain["usage"]
    assert len(plain["choices"]) == len(choices)


def add_up(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    piece = dict(piece)
    if "delta" in piece:
        piece["text"] = piece.pop("delta").get("content", "")
    for key, value in piece.items():
        if key in ("text", "token_ids") and key in whole:
            whole[key] += value
        elif key == "logprobs" and value is not None and whole.get(key) is not None:
            whole[key] = {k: v if v is None else whole[key][k] + v for k, v in value.items()}
        elif value is not None or key not in whole:
            whole[key] = value


def test_sampling_fields_reach_the_engine(served: Served) -> None:
    served.client.chat.completions.create(
        model=MODEL,
        messages=USER,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": 50, "9": -100},
        max_completion_tokens=3,
        seed=11,
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "stop_token_ids": [400],
            "ignore_eos": True,
            "min_tokens": 2,
            "priority": -3,
            "cache_salt": "me",
            "prompt_logprobs": 1,
        },
    )
    request = served.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 5, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {7: 50.0, 9: -100.0}
    assert (sampling.max_tokens, sampling.min_tokens) == (3, 2)
    assert sampling.eos_token_ids == ()
    assert sampling.stop_token_ids == (400,)
    assert (request.priority, request.salt) == (-3, "me")


def test_completion_defaults_to_16_tokens(served: Served) -> None:
    answer = served.client.completions.create(model=MODEL, prompt="A proa")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.object == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
def test_batch_of_prompts_and_echo(served: Served, stream: bool) -> None:
    prompts = ["Hello 🦊", "A proa is"]
    answer = served.client.completions.create(model=MODEL, prompt=prompts, n=2, echo=True, max_tokens=4, stream=stream)
    texts = [""] * 4
    if stream:
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == sum(len(served.tokenizer.encode(p)) for p in prompts)
        texts = [choice.text for choice in answer.choices]
    start = served.tokenizer.decode(served.tokenizer.encode(STORY)[:4])
    assert texts == [prompts[0] + start] * 2 + [prompts[1] + start] * 2


def test_token_prompts(served: Served) -> None:
    ids = served.tokenizer.encode("Hello world")
    one = served.client.completions.create(model=MODEL, prompt=ids, echo=True, max_tokens=1)
    assert served.engine.requests[-1].tokens == ids
    assert one.choices[0].text.startswith("Hello world")
    two = served.client.completions.create(model=MODEL, prompt=[ids, ids[:2]], max_tokens=1)
    assert sorted(len(request.tokens) for request in served.engine.requests[-2:]) == [2, len(ids)]
    assert len(two.choices) == 2


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("prompt", ["naïve 🦊 fox", "<|im_start|>user\n🦊<|im_end|>"])
def test_completion_logprobs_with_echo(served: Served, prompt: str, skips: bool) -> None:
    answer = served.client.completions.create(
        model=MODEL, prompt=prompt, logprobs=2, echo=True, max_tokens=30, extra_body={"skip_special_tokens": skips}
    )
    choice = answer.choices[0]
    prompt_ids = served.tokenizer.encode(prompt)
    ids = prompt_ids + served.tokenizer.encode(STORY)[:30]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == [-(token % 7 + 1) / 8 for token in ids[1:]]
    assert all(len(top) == 2 for top in logprobs.top_logprobs[1:])
    for spelt, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not spelt.startswith("bytes:"):
            assert choice.text[offset : offset + len(spelt)] == spelt
    assert any(spelt.startswith("bytes:") for spelt in logprobs.tokens)


def test_offsets_of_a_token_that_the_tokenizer_adds(tokenizer: Tokenizer) -> None:
    """It is not in the text that is echoed."""
    tokens = [tokenizer.encode("<|endoftext|>")[0], *tokenizer.encode("Hello")]
    writer = CompletionLogprobsWriter(tokenizer, tokenizer.detokenizer(skip_special_tokens=False), 0)
    written = writer.write(tokens, [None] * len(tokens), "Hello")
    assert written.text_offset[:2] == [0, 0]


def test_echo_waits_for_prompt_logprobs(tokenizer: Tokenizer) -> None:
    """Prompt logprobs come with choice 0; here the other choices' tokens arrive before it."""

    def reply(request: EngineRequest) -> Reply:
        return says(tokenizer, "one two", delay_s=0.0 if request.sampling.prompt_logprobs is None else 0.1)

    with Served(tokenizer, reply) as served:
        answer = served.client.completions.create(model=MODEL, prompt="Hello world", n=3, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Hello worldone two"] * 3
    scores = [choice.logprobs.token_logprobs for choice in answer.choices if choice.logprobs is not None]
    assert len(scores) == 3
    assert scores[0] == scores[1] == scores[2]


def test_scoring_with_max_tokens_zero(served: Served) -> None:
    answer = served.client.completions.create(model=MODEL, prompt="Hello world", logprobs=1, echo=True, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "Hello world"
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == len(served.tokenizer.encode("Hello world"))
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs_and_token_ids(served: Served) -> None:
    body = {"model": MODEL, "messages": USER, "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body).json()
    prompt = served.engine.requests[-1].tokens
    assert answer["prompt_token_ids"] == prompt
    assert answer["prompt_logprobs"][0] is None
    for token, entry in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True):
        assert entry[str(token)]["rank"] == 1
        assert entry[str(token)]["logprob"] == -(token % 7 + 1) / 8
        assert len(entry) == 2


def test_tools_reach_the_template(tokenizer: Tokenizer, tmp_path: Any) -> None:
    from fakes import make_tokenizer

    template = "{{ tools | tojson if tools else 'none' }}|{{ reasoning_effort }}|{{ mood }}|{{ messages[0]['role'] }}"
    spoken = Tokenizer.load(make_tokenizer(tmp_path / "t", template))
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with Served(spoken, says(tokenizer, "ok")) as served:

        def prompt(**fields: Any) -> str:
            served.client.chat.completions.create(
                model=MODEL, messages=[{"role": "developer", "content": "x"}], tools=tools, **fields
            )
            return spoken.decode(served.engine.requests[-1].tokens)

        kwargs = {"chat_template_kwargs": {"mood": "calm"}}
        with_tools = prompt(tool_choice="auto", reasoning_effort="low", extra_body=kwargs)
        assert with_tools.startswith('[{"type": "function"')
        assert with_tools.endswith("|low|calm|system")
        assert prompt(tool_choice="none").startswith("none|")


def test_cancelled_stream_aborts(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, says(tokenizer, STORY * 50, delay_s=0.01)) as served:
        stream = served.client.chat.completions.create(model=MODEL, messages=USER, n=3, stream=True)
        next(stream)
        assert len(served.engine.in_flight) == 3
        stream.close()
        assert wait_for(lambda: len(served.engine.aborted) == 3)
        assert not served.engine.in_flight


def test_disconnect_aborts_unstreamed_request(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, says(tokenizer, STORY * 50, delay_s=0.01)) as served:
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=0.3).chat.completions.create(model=MODEL, messages=USER)
        assert wait_for(lambda: len(served.engine.aborted) == 1)
        assert not served.engine.in_flight
        assert wait_for(lambda: 'outcome="cancelled"' in httpx.get(f"{served.url}/metrics").text)


def test_disconnect_before_the_first_token_aborts(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, Reply(tokenizer.encode("late"), delay_s=3.0)) as served:
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=0.3).chat.completions.create(model=MODEL, messages=USER, stream=True)
        assert wait_for(lambda: len(served.engine.aborted) == 1, seconds=1.5)


def test_64_streams(tokenizer: Tokenizer) -> None:
    texts = [STORY[: 3 + i % len(STORY)] for i in range(64)]

    def reply(request: EngineRequest) -> Reply:
        return says(tokenizer, texts[request.sampling.seed], delay_s=0.001)

    with Served(tokenizer, reply) as served:

        def ask(seed: int) -> str:
            stream = served.client.chat.completions.create(model=MODEL, messages=USER, seed=seed, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        with ThreadPoolExecutor(64) as pool:
            assert list(pool.map(ask, range(64))) == texts
        assert len(served.engine.finished) == 64
        assert served.engine.aborted == []


def test_error_in_the_middle_of_a_stream(tokenizer: Tokenizer) -> None:
    death = EngineDead("The engine process died.", "See its log.")
    with Served(tokenizer, says(tokenizer, STORY, error=death, error_after=5)) as served:
        stream = served.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        got = []
        with pytest.raises(openai.APIError, match="The engine process died") as caught:
            got.extend(stream)
        assert len(got) > 1
        assert caught.value.code == "engine_dead"
        with pytest.raises(openai.InternalServerError) as refused:
            served.client.chat.completions.create(model=MODEL, messages=USER)
        assert refused.value.status_code == 503
        body = {"model": MODEL, "messages": USER, "stream": True}
        text = httpx.post(f"{served.url}/v1/chat/completions", json=body).text
        assert text.endswith("data: [DONE]\n\n")
        assert '"error":' in text.split("\n\n")[-3]


def test_impossible_logprobs_are_finite() -> None:
    from proa.server.logprobs import LOWEST, _finite

    assert _finite(-math.inf) == LOWEST
    assert _finite(-0.5) == -0.5


def test_models(served: Served) -> None:
    cards = served.client.models.list().data
    assert [card.id for card in cards] == [MODEL]
    assert served.client.models.retrieve(MODEL).owned_by == "proa"
    assert served.client.models.retrieve("default").id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.chat.completions.create(model="gpt-9", messages=USER)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_what_is_not_served_is_asked_once_and_is_no_failure(served: Served) -> None:
    with pytest.raises(openai.InternalServerError, match="computes no embeddings"):
        served.client.with_options(max_retries=2).embeddings.create(model=MODEL, input="Hi")
    metrics = httpx.get(f"{served.url}/metrics").text
    assert 'proa_requests_total{endpoint="other",outcome="refused"} 1.0' in metrics
    assert 'outcome="failed"' not in metrics
