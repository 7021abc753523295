"""Anthropic's client against a real server with a scripted engine; raw events are read with httpx."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fakes import FakeEngine, Reply
from proa.errors import EngineDead, QueueFull, ShuttingDown
from proa.server import body, sse
from proa.server.fields import REFUSED
from proa.text.tokenizer import Tokenizer
from served import MODEL, Served

anthropic = pytest.importorskip("anthropic")

MESSAGES = "/v1/messages"
USER: Any = [{"role": "user", "content": "Tell me about proas."}]
STORY = "The quick brown fox 🦊 jumps over the lazy dog; 你好, wörld! done."
OPENING = "<|im_start|>user\nTell me about proas.<|im_end|>\n<|im_start|>assistant\n"


def says(tokenizer: Tokenizer, text: str = STORY, **script: Any) -> Reply:
    return Reply(tokenizer.encode(text), **script)


def client_of(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, **{"api_key": "none", "max_retries": 0, "timeout": 20, **options})


def post(served: Served, path: str = MESSAGES, **changes: Any) -> httpx.Response:
    fields = {"model": MODEL, "messages": USER, "max_tokens": 100, **changes}
    return httpx.post(served.url + path, json={name: value for name, value in fields.items() if value != "absent"})


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Parse a stream to (name, data) of each event; asserts that the framing is valid."""
    frames = response.text.removesuffix("\n\n").split("\n\n")
    lines = [frame.split("\n") for frame in frames]
    assert all(len(pair) == 2 for pair in lines)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


def prompt_of(served: Served) -> str:
    return served.tokenizer.decode(served.engine.requests[-1].tokens, skip_special_tokens=False)


def wait_for(condition: Any, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with Served(tokenizer, says(tokenizer, cached_tokens=3), accept_any_model=False) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as shared:
        yield shared


def test_message(served: Served, client: anthropic.Anthropic) -> None:
    sampling = {"temperature": 0.25, "top_p": 0.5, "top_k": 5}  # newer clients have no arguments for them
    answer = client.messages.create(
        model=MODEL, max_tokens=100, messages=USER, metadata={"user_id": "me"}, extra_body=sampling
    )
    request = served.engine.requests[-1]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in answer.content if block.type == "text"] == [("text", STORY)]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.cache_read_input_tokens == 3
    assert answer.usage.cache_creation_input_tokens == 0
    assert answer.usage.input_tokens == len(request.tokens) - 3
    assert answer.usage.output_tokens == len(served.tokenizer.encode(STORY))
    assert answer.id.startswith("msg_")
    assert answer._request_id is not None
    assert answer.id.endswith(answer._request_id)
    assert prompt_of(served) == OPENING
    got = request.sampling
    assert (got.temperature, got.top_p, got.top_k, got.max_tokens) == (0.25, 0.5, 5, 100)


def test_events_of_a_stream(served: Served) -> None:
    response = post(served, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    deltas = names.count("content_block_delta")
    assert deltas > 1
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert events[1][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(data["index"], data["delta"]["type"]) for _, data in events[2 : 2 + deltas]} == {(0, "text_delta")}
    assert events[-3][1] == {"type": "content_block_stop", "index": 0}
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert start["usage"]["input_tokens"] == events[-2][1]["usage"]["input_tokens"]


@pytest.mark.parametrize("changes", [{}, {"stop_sequences": ["x 🦊 jum", "never"]}, {"max_tokens": 3}])
def test_stream_adds_up_to_the_message(client: anthropic.Anthropic, changes: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": USER, **changes}
    plain = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == plain.content[0].text  # type: ignore[union-attr]
    alike = {"role", "model", "stop_reason", "stop_sequence", "usage"}
    assert whole.model_dump(include=alike) == plain.model_dump(include=alike)
    assert [block.type for block in whole.content] == ["text"]


def test_stop_sequence(served: Served, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=USER, stop_sequences=["x 🦊 jum", "never"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "x 🦊 jum")
    assert answer.content[0].text == "The quick brown fo"  # type: ignore[union-attr]
    assert wait_for(lambda: not served.engine.in_flight)


def test_max_tokens(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=3, messages=USER)
    assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("max_tokens", None, 3)


def test_answer_without_text(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, Reply([])) as served, client_of(served) as client:
        answer = client.messages.create(model=MODEL, max_tokens=3, messages=USER)
        assert answer.model_dump()["content"][0]["text"] == ""
        echoed: Any = [*USER, {"role": "assistant", "content": answer.content}, *USER]
        assert client.messages.create(model=MODEL, max_tokens=3, messages=echoed).stop_reason == "end_turn"


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


BLOCK = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}, "citations": None}
PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "system": ({"system": "Be brief."}, turn("system", "Be brief.") + OPENING),
    "system blocks": (
        {"system": [BLOCK, {"type": "text", "text": "Be kind."}]},
        turn("system", "Be brief.\nBe kind.") + OPENING,
    ),
    "no system": ({"system": ""}, turn("system", "") + OPENING),
    "blocks": (
        {"messages": [{"role": "user", "content": [BLOCK]}]},
        turn("user", "Be brief.") + "<|im_start|>assistant\n",
    ),
    "neighbours": ({"messages": [*USER, *USER]}, OPENING.replace("proas.", "proas.\nTell me about proas.")),
    "dialogue": (
        {"messages": [*USER, {"role": "assistant", "content": "A boat."}, *USER]},
        turn("user", "Tell me about proas.") + turn("assistant", "A boat.") + OPENING,
    ),
    "begun answer": ({"messages": [*USER, {"role": "assistant", "content": "A boat"}]}, OPENING + "A boat"),
    "begun answer in blocks": (
        {"messages": [*USER, {"role": "assistant", "content": [{"type": "text", "text": "A boat "}]}]},
        OPENING + "A boat ",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(served: Served, name: str) -> None:
    changes, prompt = PROMPTS[name]
    response = post(served, **changes)
    assert response.status_code == 200, response.text
    assert prompt_of(served) == prompt
    counted = post(served, f"{MESSAGES}/count_tokens", max_tokens="absent", **changes)
    assert counted.json() == {"input_tokens": len(served.engine.requests[-1].tokens)}
    marked = "cache_control" in str(changes)
    assert counted.headers.get("x-proa-ignored-fields") == ("cache_control" if marked else None)


def test_count_tokens(served: Served, client: anthropic.Anthropic) -> None:
    asked = len(served.engine.requests)
    count = client.messages.count_tokens(model=MODEL, messages=USER)
    assert count.input_tokens == len(served.tokenizer.encode(OPENING))
    assert len(served.engine.requests) == asked


def test_cancelled_stream_aborts(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, says(tokenizer, STORY * 50, delay_s=0.01)) as served, client_of(served) as client:
        stream = client.messages.create(model=MODEL, max_tokens=2000, messages=USER, stream=True)
        next(stream)
        assert len(served.engine.in_flight) == 1
        stream.close()
        assert wait_for(lambda: len(served.engine.aborted) == 1)
        assert not served.engine.in_flight


def test_pings_while_the_engine_is_silent(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FIRST_OBJECT_S", 0.05)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    with Served(tokenizer, says(tokenizer, "late", delay_s=0.5)) as served, client_of(served) as client:
        events = events_of(post(served, stream=True, max_tokens=1))
        assert events[0] == ("ping", {"type": "ping"})
        assert events[-1][0] == "message_stop"
        with client.messages.stream(model=MODEL, max_tokens=10, messages=USER) as stream:
            assert stream.get_final_text() == "late"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": "absent"}, "max_tokens is missing"),
    "zero max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": "absent"}, "messages is missing"),
    "empty messages": ({"messages": []}, "messages"),
    "messages a string": ({"messages": "Hi"}, "messages"),
    "message no object": ({"messages": ["Hi"]}, "messages[0]"),
    "unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [*USER, {"role": "user"}]}, "messages[1].content is missing"),
    "empty content": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "content a number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "block a string": ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    "block without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
    "image": ({"messages": [{"role": "user", "content": [BLOCK, {"type": "image", "source": {}}]}]}, "'image'"),
    "document": ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, ".source is missing"),
    "tool_use": ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "content[0].id is missing"),
    "tool_result": ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, ".tool_use_id is missing"),
    "system a number": ({"system": 5}, "system"),
    "system an image": ({"system": [{"type": "image"}]}, "system[0]"),
    "hot": ({"temperature": 1000}, "temperature"),
    "temperature a string": ({"temperature": "1"}, "temperature"),
    "top_p zero": ({"top_p": 0}, "top_p"),
    "empty stop": ({"stop_sequences": [""]}, "stop_sequences[0]"),
    "stop a string": ({"stop_sequences": "end"}, "stop_sequences"),
    "stream a number": ({"stream": 1}, "stream"),
}


def check_error(response: httpx.Response) -> dict[str, str]:
    """Assert the error body's structure; return the error's details."""
    reply = response.json()
    assert set(reply) == {"type", "error", "request_id"}
    assert reply["type"] == "error"
    assert reply["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(reply["error"]) == {"type", "message"}
    details: dict[str, str] = reply["error"]
    return details


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields(served: Served, name: str, stream: bool) -> None:
    changes, named = WRONG[name]
    response = post(served, **{"stream": stream, **changes})
    assert response.status_code == 400
    error = check_error(response)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize("row", [row for row in REFUSED if "messages" in row.on], ids=lambda row: row.name)
def test_refused_fields(served: Served, row: Any, path: str) -> None:
    response = post(served, path, **{row.name: {"odd": "value"}})
    assert response.status_code == 400
    assert row.name in check_error(response)["message"]
    for value in (None, *row.neutral):
        response = post(served, path, **{row.name: value})
        assert response.status_code == 200, response.text
        assert row.name not in response.headers.get("x-proa-ignored-fields", "").split(", ")


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named(served: Served, stream: bool) -> None:
    block = {"type": "text", "text": "Hi", "wobble": 1}
    messages = [{"role": "user", "content": [block], "wubble": 1}]
    response = post(served, wibble=1, messages=messages, system=[block], stream=stream)
    assert response.status_code == 200
    assert response.headers["x-proa-ignored-fields"] == (
        "wibble, system[0].wobble, messages[0].wubble, messages[0].content[0].wobble"
    )


def test_strict_refuses_unknown_fields(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, says(tokenizer), strict=True) as served:
        for changes in ({"wibble": 1}, {"messages": [{**USER[0], "wibble": 1}]}):
            response = post(served, **changes)
            assert response.status_code == 400
            assert "wibble" in check_error(response)["message"]
        assert post(served, cache_control={"type": "ephemeral"}, service_tier="auto").status_code == 200


def test_api_key(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, says(tokenizer), api_key=("sesame",)) as served:
        ask = {"model": MODEL, "max_tokens": 10, "messages": USER}
        for right in ({"api_key": "sesame"}, {"api_key": None, "auth_token": "sesame"}):
            with client_of(served, **right) as client:
                assert client.messages.create(**ask).stop_reason == "max_tokens"
        for wrong in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
            with client_of(served, **wrong) as client, pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**ask)
            assert caught.value.type == "authentication_error"
        assert check_error(post(served))["type"] == "authentication_error"
        assert httpx.get(f"{served.url}/v1/models", headers={"x-api-key": "sesame"}).status_code == 200
        assert httpx.get(f"{served.url}/v1/models", headers={"x-api-key": "sésame".encode()}).status_code == 401


def test_unknown_model_and_routes(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here") as caught:
        client.messages.create(model="other", max_tokens=10, messages=USER)
    assert caught.value.type == "not_found_error"
    batches = httpx.post(f"{served.url}{MESSAGES}/batches", json={})
    assert (batches.status_code, check_error(batches)["type"]) == (501, "api_error")
    lost = httpx.post(f"{served.url}{MESSAGES}/wibble", json={})
    assert (lost.status_code, check_error(lost)["type"]) == (404, "not_found_error")
    wrong = httpx.get(served.url + MESSAGES)
    assert (wrong.status_code, check_error(wrong)["type"]) == (405, "invalid_request_error")
    text = httpx.post(served.url + MESSAGES, content=b"{}", headers={"content-type": "text/plain"})
    assert (text.status_code, check_error(text)["type"]) == (415, "invalid_request_error")
    broken = httpx.post(served.url + MESSAGES, content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, check_error(broken)["type"]) == (400, "invalid_request_error")
    assert "param" in httpx.get(f"{served.url}{MESSAGES}x").json()["error"]  # OpenAI's shape


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised", "kind"),
    [
        (QueueFull("256 wait.", "Later."), anthropic.RateLimitError, "rate_limit_error"),
        (ShuttingDown("Going.", "Later."), anthropic.InternalServerError, "overloaded_error"),
        (EngineDead("It died.", "See its log."), anthropic.InternalServerError, "api_error"),
    ],
)
def test_refusals_of_the_engine(tokenizer: Tokenizer, error: Any, raised: Any, kind: str, stream: bool) -> None:
    with Served(tokenizer, Reply(error=error)) as served, client_of(served) as client:
        with pytest.raises(raised) as caught:
            client.messages.create(model=MODEL, max_tokens=10, messages=USER, stream=stream)
        assert caught.value.type == kind
        assert caught.value.status_code == error.http_status
        assert int(caught.value.response.headers["retry-after"]) > 0


def test_loading_is_overloaded(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, engine=FakeEngine(state="loading")) as served:
        assert wait_for(lambda: httpx.get(f"{served.url}/health").status_code == 503)
        response = post(served)
        assert (response.status_code, check_error(response)["type"]) == (503, "overloaded_error")
        assert int(response.headers["retry-after"]) > 0
        served.call(served.engine.become_ready)


def test_error_in_the_middle_of_a_stream(tokenizer: Tokenizer) -> None:
    death = EngineDead("It broke.", "Ask again.")
    with Served(tokenizer, says(tokenizer, error=death, error_after=5)) as served, client_of(served) as client:
        events = events_of(post(served, stream=True))
        name, data = events[-1]
        assert name == data["type"] == "error"
        assert data["error"] == {"type": "api_error", "message": "It broke. Ask again."}
        assert data["request_id"].startswith("req-")
        assert "message_stop" not in [name for name, _ in events]
        got = []
        with pytest.raises(anthropic.APIStatusError, match="It broke") as caught:
            got.extend(client.messages.create(model=MODEL, max_tokens=100, messages=USER, stream=True))
        assert len(got) > 2
        assert caught.value.type == "api_error"


def test_body_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_BODY_BYTES", 1000)
    response = post(served, system="x" * 2000)
    assert (response.status_code, check_error(response)["type"]) == (413, "request_too_large")


def test_a_bug_is_an_api_error_without_details(tokenizer: Tokenizer) -> None:
    def broken(request: Any) -> Reply:
        raise ZeroDivisionError("secret detail")

    with Served(tokenizer, broken) as served:
        response = post(served)
    assert response.status_code == 500
    error = check_error(response)
    assert error["type"] == "api_error"
    assert response.headers["request-id"] in error["message"]
    assert "secret" not in response.text
