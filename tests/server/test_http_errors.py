"""Refused requests: status codes and error bodies, over the ASGI interface without a socket."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from fakes import FakeEngine, Reply
from proa.errors import QueueFull
from proa.server import body as body_module
from proa.server.fields import IGNORED, REFUSED
from proa.text.tokenizer import Tokenizer
from served import MODEL, make_service
from server.http_calls import CHAT, COMPLETIONS, USER, check_shape, post, run, send

MALFORMED = {
    "empty": (b"", 400, "invalid_json"),
    "not json": (b"{", 400, "invalid_json"),
    "trailing comma": (b'{"model": "fake",}', 400, "invalid_json"),
    "nan": (b'{"temperature": NaN}', 400, "invalid_json"),
    "an array": (b"[1, 2]", 400, "invalid_json"),
    "a string": (b'"hello"', 400, "invalid_json"),
    "invalid utf-8": (b'{"model": "\xff\xfe"}', 400, "invalid_utf8"),
    "half a character": (b'{"model": "\xf0\x9f\xa6"}', 400, "invalid_utf8"),
    "utf-16": ('{"model": "fake"}'.encode("utf-16"), 400, "invalid_utf8"),
    "lone surrogate": (b'{"model": "\\ud83e"}', 400, "invalid_json"),
    "a deep nest": (b'{"messages": ' + b"[" * 100_000, 400, "invalid_json"),
    "nul bytes": (b"\0" * 64, 400, "invalid_json"),
    "overflowing number": (b'{"temperature": 1e999}', 400, "invalid_json"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_malformed_bodies(tokenizer: Tokenizer, path: str, name: str) -> None:
    content, status, code = MALFORMED[name]
    response = post(tokenizer, path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert check_shape(response)["code"] == code


WRONG_CHAT: dict[str, tuple[dict[str, Any], str | None]] = {
    "no messages": ({"messages": None}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages no list": ({"messages": "Hi"}, "messages"),
    "message no object": ({"messages": ["Hi"]}, "messages[0]"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
    "content a number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    "part without type": ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
    "text no string": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages[0].content[0]",
    ),
    "tool calls no list": (
        {"messages": [{"role": "assistant", "tool_calls": {"function": {}}}]},
        "messages[0].tool_calls",
    ),
    "tool call without name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    "name of a tool call no string": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, {"function": {"name": []}}]}]},
        "messages[0].tool_calls[1].function.name",
    ),
    "arguments of a tool call a number": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "tools misshapen": ({"tools": [{"name": "f"}]}, "tools[0]"),
    "forced tool": ({"tool_choice": "required"}, "tool_choice"),
    "named tool": ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "zero max_completion_tokens": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "two limits": ({"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
    "fractional max_tokens": ({"max_tokens": 1.5}, "max_tokens"),
    "max_tokens a string": ({"max_tokens": "5"}, "max_tokens"),
    "max_tokens a boolean": ({"max_tokens": True}, "max_tokens"),
    "stream a number": ({"stream": 1}, "stream"),
    "hot": ({"temperature": 1000}, "temperature"),
    "top_p zero": ({"top_p": 0}, "top_p"),
    "n zero": ({"n": 0}, "n"),
    "n huge": ({"n": 10**9}, "n"),
    "huge integer": ({"seed": 10**40}, "seed"),
    "best_of": ({"n": 1, "best_of": 3}, "best_of"),
    "empty stop": ({"stop": [""]}, "stop"),
    "stop a number": ({"stop": 3}, "stop"),
    "bias of a word": ({"logit_bias": {"dog": 1}}, "logit_bias"),
    "bias too strong": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "bias of a token that is none": ({"logit_bias": {"99999": 1}}, "logit_bias"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs"),
    "too many top_logprobs": ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    "yaml": ({"response_format": {"type": "yaml"}}, "response_format"),
    "two constraints": ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    "continue and begin": ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    "max_completion_tokens too large": ({"max_completion_tokens": 10**12}, "max_completion_tokens"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WRONG_CHAT)
def test_wrong_chat_fields(tokenizer: Tokenizer, name: str, stream: bool) -> None:
    changes, param = WRONG_CHAT[name]
    body = {"model": MODEL, "messages": USER, **({"stream": True} if stream else {}), **changes}
    response = post(tokenizer, CHAT, json=body)
    assert response.status_code == 400
    error = check_shape(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_usage_options_need_a_stream(tokenizer: Tokenizer) -> None:
    response = post(tokenizer, CHAT, json={"messages": USER, "stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert check_shape(response)["param"] == "stream_options"


WRONG_COMPLETION: dict[str, dict[str, Any]] = {
    "no prompt": {},
    "null prompt": {"prompt": None},
    "empty list": {"prompt": []},
    "a number": {"prompt": 7},
    "an object": {"prompt": {"text": "x"}},
    "mixed": {"prompt": ["a", 1]},
    "booleans": {"prompt": [True, False]},
    "an empty list inside": {"prompt": [[1], []]},
    "token out of range": {"prompt": [1, 2, 99_999]},
    "negative token": {"prompt": [-1]},
    "empty text": {"prompt": ""},
    "suffix": {"prompt": "a", "suffix": "b"},
    "max_tokens 0 without echo": {"prompt": "a", "max_tokens": 0},
    "logprobs a boolean": {"prompt": "a", "logprobs": True},
}


@pytest.mark.parametrize("name", WRONG_COMPLETION)
def test_wrong_completion_fields(tokenizer: Tokenizer, name: str) -> None:
    response = post(tokenizer, COMPLETIONS, json={"model": MODEL, **WRONG_COMPLETION[name]})
    assert response.status_code == 400
    assert check_shape(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_context(tokenizer: Tokenizer, stream: bool) -> None:
    response = post(tokenizer, COMPLETIONS, json={"model": MODEL, "prompt": [5] * 5000, "stream": stream})
    assert response.status_code == 400
    error = check_shape(response)
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"]
    assert "4096" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_is_429(tokenizer: Tokenizer, stream: bool) -> None:
    reply = Reply(error=QueueFull("256 requests are waiting.", "Try again later."))
    response = post(tokenizer, CHAT, FakeEngine(reply), json={"messages": USER, "stream": stream})
    assert response.status_code == 429
    assert check_shape(response)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    "row", [row for row in REFUSED if row.is_for("chat") or row.is_for("completions")], ids=lambda row: row.name
)
def test_refused_fields(tokenizer: Tokenizer, row: Any) -> None:
    path, rest = (COMPLETIONS, {"prompt": "a"}) if "completions" in row.on else (CHAT, {"messages": USER})
    response = post(tokenizer, path, json={**rest, row.name: {"odd": "value"}})
    assert response.status_code == 400
    error = check_shape(response)
    assert (error["code"], error["param"]) == ("unsupported_parameter", row.name)
    for value in (None, *row.neutral):
        response = post(tokenizer, path, json={**rest, row.name: value}, options={"strict": True})
        assert response.status_code == 200, response.text
        assert "x-proa-ignored-fields" not in response.headers


def test_true_is_not_one(tokenizer: Tokenizer) -> None:
    assert post(tokenizer, CHAT, json={"messages": USER, "parallel_tool_calls": 1}).status_code == 400
    assert post(tokenizer, CHAT, json={"messages": USER, "repeat_penalty": 1}).status_code == 200


def test_ignored_fields(tokenizer: Tokenizer) -> None:
    body = {"messages": USER, **{row.name: "anything" for row in IGNORED}}
    response = post(tokenizer, CHAT, json=body, options={"strict": True})
    assert response.status_code == 200
    assert response.headers["x-proa-ignored-fields"].split(", ") == [row.name for row in IGNORED]


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named(tokenizer: Tokenizer, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": USER, "stream": stream, "wibble": 1, "strange näme\n": None}
    if stream:
        body["stream_options"] = {"wobble": 1}

    async def twice() -> httpx.Response:
        service = make_service(tokenizer, FakeEngine(Reply(tokenizer.encode("Hello"))))
        await send(service, "POST", CHAT, json=body)
        return await send(service, "POST", CHAT, json=body)

    with caplog.at_level(logging.WARNING, "proa"):
        response = run(twice())
    assert response.status_code == 200
    named = "wibble, strange%20n%C3%A4me%0A" + (", stream_options.wobble" if stream else "")
    assert response.headers["x-proa-ignored-fields"] == named
    assert sum("'wibble'" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("field", [{"wibble": 1}, {"stream": True, "stream_options": {"wobble": 1}}])
def test_strict_refuses_unknown_fields(tokenizer: Tokenizer, field: dict[str, Any]) -> None:
    response = post(tokenizer, CHAT, json={"messages": USER, **field}, options={"strict": True})
    assert response.status_code == 400
    error = check_shape(response)
    assert error["code"] == "unknown_parameter"
    assert error["param"] in ("wibble", "stream_options.wobble")


def test_wrong_routes_and_methods(tokenizer: Tokenizer) -> None:
    async def work() -> list[httpx.Response]:
        service = make_service(tokenizer, FakeEngine(), accept_any_model=False)
        return [
            await send(service, "GET", "/v1/nothing"),
            await send(service, "GET", CHAT),
            await send(service, "DELETE", "/v1/models/fake"),
            await send(service, "GET", "/v1/models/other"),
        ]

    lost, wrong, also_wrong, no_model = run(work())
    assert (lost.status_code, check_shape(lost)["code"]) == (404, "unknown_url")
    assert (wrong.status_code, check_shape(wrong)["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]
    assert also_wrong.status_code == 405
    assert (no_model.status_code, check_shape(no_model)["code"]) == (404, "model_not_found")


def test_names_of_models_have_slashes_and_the_list_may_end_in_one(tokenizer: Tokenizer) -> None:
    async def work() -> list[httpx.Response]:
        options = {"served_model_name": "my/model", "accept_any_model": False}
        service = make_service(tokenizer, FakeEngine(), **options)
        paths = ("my/model", "my%2Fmodel", "my%2Fother", "")
        return [await send(service, "GET", f"/v1/models/{path}", follow_redirects=True) for path in paths]

    plain, escaped, other, listed = run(work())
    assert plain.json()["id"] == escaped.json()["id"] == "my/model"
    assert (other.status_code, check_shape(other)["code"]) == (404, "model_not_found")
    assert [card["id"] for card in listed.json()["data"]] == ["my/model"]


def test_other_clients_than_browsers_may_leave_out_the_media_type(tokenizer: Tokenizer) -> None:
    """litellm does, with Ollama's endpoints."""
    response = post(tokenizer, CHAT, content=json.dumps({"messages": USER}).encode(), headers={})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers", [{"content-type": "text/plain"}, {"origin": "http://x"}, {"sec-fetch-site": "none"}]
)
def test_other_media_types(tokenizer: Tokenizer, headers: dict[str, str]) -> None:
    """A web page may send these across origins without a CORS preflight."""
    response = post(tokenizer, CHAT, content=json.dumps({"messages": USER}).encode(), headers=headers)
    assert response.status_code == 415
    assert "application/json" in check_shape(response)["message"]


def test_media_type(tokenizer: Tokenizer) -> None:
    response = post(
        tokenizer,
        CHAT,
        content=json.dumps({"messages": USER}).encode(),
        headers={"content-type": "application/json; charset=utf-8"},
    )
    assert response.status_code == 200


def test_body_limit(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 1000)
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    response = post(tokenizer, CHAT, json=body)
    assert response.status_code == 413
    assert check_shape(response)["code"] == "body_too_large"


def test_api_key(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        service = make_service(tokenizer, FakeEngine(Reply(tokenizer.encode("Hello"))), api_key=("other", "sésame"))
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sésame".encode()}):
            for path in (CHAT, "/v1/nothing", "/tokenize"):
                response = await send(service, "POST", path, json={"messages": USER}, headers=headers)
                assert response.status_code == 401
                assert check_shape(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        right = {"authorization": "Bearer sésame".encode()}
        assert (await send(service, "POST", CHAT, json={"messages": USER}, headers=right)).status_code == 200
        assert (await send(service, "GET", "/health/generate")).status_code == 401
        for path in ("/health", "/metrics", "/version"):
            assert (await send(service, "GET", path)).status_code == 200

    run(work())


def test_request_id(tokenizer: Tokenizer) -> None:
    def id_for(given: str) -> str:
        response = post(tokenizer, CHAT, json={"messages": USER}, headers={"x-request-id": given})
        assert response.json()["id"].endswith(response.headers["x-request-id"])
        return response.headers["x-request-id"]

    assert id_for("trace-42") == "trace-42"
    assert id_for("bad id;") != "bad id;"
    assert id_for("x" * 500) != "x" * 500


def test_a_bug_is_a_500_without_details(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> Reply:
        raise ZeroDivisionError("secret detail")

    response = post(tokenizer, CHAT, FakeEngine(broken), json={"messages": USER})
    assert response.status_code == 500
    error = check_shape(response)
    assert error["code"] == "internal_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


def test_cors(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        service = make_service(tokenizer, FakeEngine(), api_key=("k",), cors_origin=("http://ui",))
        asked = {"origin": "http://ui", "access-control-request-method": "POST"}
        preflight = await send(service, "OPTIONS", CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://ui"
        other = await send(service, "OPTIONS", CHAT, headers={**asked, "origin": "http://evil"})
        assert "access-control-allow-origin" not in other.headers

    run(work())


def test_tokenize_and_back(tokenizer: Tokenizer) -> None:
    text = "Hello 🦊 world"
    answer = post(tokenizer, "/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert post(tokenizer, "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = post(tokenizer, "/tokenize", json={"messages": USER}).json()
    written = post(tokenizer, "/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert written == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tokens", [[-1], [512], [10**12], ["a"], "a", [True]])
def test_detokenize_refuses(tokenizer: Tokenizer, tokens: Any) -> None:
    response = post(tokenizer, "/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert check_shape(response)["param"].startswith("tokens")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": USER}, {"prompt": 5}])
def test_tokenize_refuses(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    response = post(tokenizer, "/tokenize", json=body)
    assert response.status_code == 400
    check_shape(response)


def test_tokenize_names_unknown_fields(tokenizer: Tokenizer) -> None:
    body = {"prompt": "a", "wibble": 1}
    assert post(tokenizer, "/tokenize", json=body).headers["x-proa-ignored-fields"] == "wibble"
    strict = post(tokenizer, "/tokenize", json=body, options={"strict": True})
    assert (strict.status_code, check_shape(strict)["param"]) == (400, "wibble")
