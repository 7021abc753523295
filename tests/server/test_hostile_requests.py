"""Oversized and malicious requests, over the ASGI interface without a socket."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from fakes import FakeEngine, Reply
from proa.server.app import build_app
from proa.text.tokenizer import Tokenizer
from served import make_service
from server.http_calls import CHAT, COMPLETIONS, USER, check_shape, post, run, send


@pytest.mark.parametrize("name_length", [1, 7, 60, 998, 1001, 5000])
@pytest.mark.parametrize("letter", ["x", "ä"])
def test_ignored_header_holds_whole_names(tokenizer: Tokenizer, name_length: int, letter: str) -> None:
    names = [f"{letter * name_length}{i}" for i in range(400)]
    response = post(tokenizer, COMPLETIONS, json={"prompt": "a", **dict.fromkeys(names, 1)})
    assert response.status_code == 200
    value = response.headers["x-proa-ignored-fields"]
    assert len(value) <= 1020
    assert value == value.strip()
    *shown, more = value.split(", ")
    quoted = [name.replace("ä", "%C3%A4") for name in names]
    assert shown == quoted[: len(shown)]
    assert more == f"{len(names) - len(shown)} more"


def test_ignored_header_names_the_empty_field(tokenizer: Tokenizer) -> None:
    response = post(tokenizer, COMPLETIONS, json={"prompt": "a", "wibble": 1, "": 1})
    assert response.headers["x-proa-ignored-fields"] == "wibble, %22%22"


def test_paths_cannot_write_log_lines(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        await send(make_service(tokenizer, FakeEngine()), "GET", "/x%0a2026 fake%1b[31m%c2%85")

    with caplog.at_level(logging.INFO, "proa.server.middleware"):
        run(work())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "proa.server.middleware"]
    assert line.startswith("GET /x\\n2026 fake\\x1b[31m\\x85: 404")


def test_a_broken_upload_is_not_logged_as_a_bug(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(tokenizer, FakeEngine())
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def answer(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    with caplog.at_level(logging.INFO, "proa"):
        run(build_app(service)(scope, receive, answer))
    assert sent == []
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "the client disconnected" in caplog.text
    assert 'outcome="cancelled"} 1.0' in service.metrics.render().decode()


@pytest.mark.parametrize("bias", [{"9" * 5000: 1}, {"5": 1, "05": 2}])
def test_odd_logit_bias(tokenizer: Tokenizer, bias: dict[str, int]) -> None:
    response = post(tokenizer, CHAT, json={"messages": USER, "logit_bias": bias})
    assert response.status_code == 400
    assert check_shape(response)["param"] == "logit_bias"
    assert len(response.text) < 500


@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 4097], "x" * 4097])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages"])
def test_stop_limits(tokenizer: Tokenizer, path: str, stop: Any) -> None:
    if path == "/v1/messages":
        stop = [stop] if isinstance(stop, str) else stop
        response = post(tokenizer, path, json={"messages": USER, "max_tokens": 4, "stop_sequences": stop})
    else:
        body = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
        response = post(tokenizer, path, json={**body, "stop": stop})
    assert response.status_code == 400
    assert ("64" if len(stop) == 65 else "4096") in response.text


def test_stops_at_the_limits(tokenizer: Tokenizer) -> None:
    assert post(tokenizer, CHAT, json={"messages": USER, "stop": ["x" * 4096] * 64}).status_code == 200


def test_compressed_bodies(tokenizer: Tokenizer) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = post(tokenizer, CHAT, content=b"\x1f\x8b", headers=headers)
    assert response.status_code == 415
    assert "gzip" in check_shape(response)["message"]


def test_health_polls_are_quiet(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> list[int]:
        loading = make_service(tokenizer, FakeEngine(state="loading"))
        ready = make_service(tokenizer, FakeEngine())
        return [(await send(s, m, "/health")).status_code for s in (loading, ready) for m in ("GET", "HEAD")]

    with caplog.at_level(logging.INFO, "proa"):
        assert run(work()) == [503, 503, 200, 200]
    assert not caplog.records


def test_null_content_beside_tool_calls_is_empty(tokenizer: Tokenizer) -> None:
    def prompt(content: str | None) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [*USER, {"role": "assistant", "content": content, "tool_calls": [call]}]
        tokens = post(tokenizer, "/tokenize", json={"messages": messages}).json()["tokens"]
        return tokenizer.decode(tokens)

    assert prompt(None) == prompt("")
    assert "None" not in prompt(None)


def test_logprobs_of_no_token(tokenizer: Tokenizer) -> None:
    response = post(tokenizer, CHAT, FakeEngine(Reply()), json={"messages": USER, "logprobs": True})
    assert response.json()["choices"][0]["logprobs"]["content"] == []
    response = post(tokenizer, CHAT, FakeEngine(Reply()), json={"messages": USER})
    assert response.json()["choices"][0]["logprobs"] is None


def test_echo_uses_the_larger_number_of_logprobs(tokenizer: Tokenizer) -> None:
    body = {"prompt": "Hello world", "echo": True, "logprobs": 2, "prompt_logprobs": 0}
    choice = post(tokenizer, COMPLETIONS, json=body).json()["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][1]) >= 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a " * 200_000}),
        (COMPLETIONS, {"prompt": ["a " * 200_000, "a"], "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "ä" * 200_000}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a " * 200_000}], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a " * 200_000}]}),
        ("/tokenize", {"prompt": "a " * 200_000}),
    ],
)
def test_texts_too_long_for_the_context_are_not_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    response = post(tokenizer, path, FakeEngine(), json=body)
    assert response.status_code == 400
    assert "4096 tokens" in response.text
    assert re.search(r"The text has 400\d{3} bytes", response.text)
    if not path.startswith("/v1/messages"):
        assert check_shape(response)["code"] == "context_length_exceeded"


def test_the_longest_text_that_may_fit_is_tokenised(tokenizer: Tokenizer) -> None:
    """A text as long as the context filled with the longest token."""
    spellings = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    longest = max(spellings, key=len)
    token = spellings.index(longest)
    assert tokenizer.encode(longest.decode() * 4096) == [token] * 4096
    assert post(tokenizer, "/tokenize", json={"prompt": longest.decode() * 4096}).json()["count"] == 4096
    over = post(tokenizer, "/tokenize", json={"prompt": longest.decode() * 4097})
    assert (over.status_code, check_shape(over)["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("prompts", "n", "status"), [(260, 1, 200), (261, 1, 400), (20_000, 1, 400), (131, 2, 400)])
def test_more_answers_than_the_queue_holds_are_refused(tokenizer: Tokenizer, prompts: int, n: int, status: int) -> None:
    engine = FakeEngine(Reply(tokenizer.encode("Hello")))
    body = {"prompt": [[5]] * prompts, "n": n, "max_tokens": 1}
    response = post(tokenizer, COMPLETIONS, engine, json=body)
    assert response.status_code == status
    if status == 400:
        error = check_shape(response)
        assert str(prompts * n) in error["message"]
        assert "260" in error["message"]


@pytest.mark.parametrize("depth", [450, 900])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_deep_nests(tokenizer: Tokenizer, path: str, depth: int) -> None:
    nest = json.loads("[" * depth + "]" * depth)
    for body in (
        {"messages": [{"role": "user", "content": "Hi", "odd": nest}]},
        {"messages": USER, "chat_template_kwargs": {"odd": nest}},
        {"messages": USER, "tools": [{"type": "function", "function": {"parameters": nest}}]},
        {"messages": USER, "response_format": nest},
        {"messages": USER, "odd": nest},
    ):
        response = post(tokenizer, path, json=body)
        assert response.status_code in (200, 400)
        if response.status_code == 400:
            check_shape(response)
