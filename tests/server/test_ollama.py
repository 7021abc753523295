"""Ollama's endpoints, and endpoints that are refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fake_parser import FakeParser
from fakes import Reply
from proa.errors import EngineDead
from proa.llm import AsyncLLM
from proa.text.tokenizer import Tokenizer
from served import MODEL, Served

ANSWER = '[[think]]I need it.[[text]]Let me look.[[call read]]{"path": "a.txt"}[[call list]]{}'
CALLS = [
    {"function": {"name": "read", "arguments": {"path": "a.txt"}}},
    {"function": {"name": "list", "arguments": {}}},
]
USER = [{"role": "user", "content": "Read a.txt."}]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture
def served(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(AsyncLLM, "answer_parser", lambda *_: FakeParser())
    with Served(tokenizer, Reply(tokenizer.encode(ANSWER))) as server:
        while httpx.get(f"{server.url}/health").status_code != 200:
            pass
        yield server


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json={"model": f"{MODEL}:latest", **body}, timeout=20)


def test_chat_streams_lines(served: Served) -> None:
    response = post(served, "/api/chat", messages=USER, tools=[TOOL], think=True, keep_alive="5m",
                    options={"num_ctx": 8192, "num_predict": 300, "top_k": 5, "repeat_penalty": 1.5})  # fmt: skip
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["x-proa-ignored-fields"] == "options.num_ctx, keep_alive"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    assert "".join(message["content"] for message in messages) == "Let me look."
    assert "".join(message.get("thinking", "") for message in messages) == "I need it."
    assert [call for message in messages for call in message.get("tool_calls", [])] == CALLS
    last = lines[-1]
    assert (last["model"], last["done_reason"]) == (MODEL, "stop")
    assert last["prompt_eval_count"] == len(served.engine.requests[-1].tokens)
    assert last["eval_count"] > 10
    assert last["total_duration"] >= last["eval_duration"] > 0
    got = served.engine.requests[-1].sampling
    assert (got.top_k, got.repetition_penalty, got.max_tokens) == (5, 1.5, 300)


def test_plain_answers_add_up(served: Served) -> None:
    whole = post(served, "/api/chat", messages=USER, stream=False).json()
    assert whole["message"] == {
        "role": "assistant", "content": "Let me look.", "thinking": "I need it.", "tool_calls": CALLS,
    }  # fmt: skip
    assert whole["done"] is True
    made = post(served, "/api/generate", prompt="Hi", system="Be brief.", stream=False).json()
    assert (made["response"], made["thinking"]) == ("Let me look.", "I need it.")
    cut = post(served, "/api/generate", prompt="Hi", raw=True, stream=False, options={"num_predict": 3}).json()
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 3)
    assert served.engine.requests[-1].tokens == served.tokenizer.encode("Hi")


def test_seed_minus_one_is_random(served: Served) -> None:
    """-1 is Ollama's default for the seed; top_k -1 keeps all tokens, as on the other endpoints."""
    for _ in range(2):
        assert post(served, "/api/generate", prompt="Hi", options={"seed": -1, "top_k": -1}).status_code == 200
    first, second = (request.sampling for request in served.engine.requests[-2:])
    assert first.seed != second.seed
    assert first.top_k == 0


def test_history_of_a_tool_loop(served: Served) -> None:
    history = [
        *USER,
        {"role": "assistant", "content": "", "thinking": "I need it.", "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_name": "read", "content": "It says hello."},
    ]
    assert post(served, "/api/chat", messages=history, stream=False).status_code == 200
    assert "It says hello." in served.tokenizer.decode(served.engine.requests[-1].tokens)


def test_descriptions(served: Served) -> None:
    for path in ("/api/tags", "/api/ps"):
        (card,) = httpx.get(f"{served.url}{path}").json()["models"]
        assert card["name"] == card["model"] == MODEL
        assert card["size"] > 0
    shown = post(served, "/api/show").json()
    assert shown["model_info"]["proa.context_length"] == 4096
    assert shown["capabilities"] == ["completion", "tools"]
    assert httpx.get(f"{served.url}/api/version").json()["version"]
    for path in ("/api/chat", "/api/generate"):
        assert post(served, path).json()["done_reason"] == "load"


WRONG = {
    "image": ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "Images"),
    "image of a prompt": ("/api/generate", {"prompt": "x", "images": ["x"]}, "Images are not supported"),
    "format": ("/api/chat", {"messages": USER, "format": 5}, "format"),
    "mirostat": ("/api/chat", {"messages": USER, "options": {"mirostat": 2}}, "options.mirostat"),
    "too many tokens": ("/api/chat", {"messages": USER, "options": {"num_predict": 10**12}}, "options.num_predict"),
    "template": ("/api/generate", {"prompt": "Hi", "template": "x"}, "template"),
    "role": ("/api/chat", {"messages": [{"role": "x", "content": "x"}]}, "messages[0].role"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_have_ollamas_form(served: Served, name: str) -> None:
    path, body, named = WRONG[name]
    response = post(served, path, **body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert named in response.json()["error"]


def test_error_in_the_middle(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer.encode("Hello quick fox"), error=EngineDead("It died."), error_after=1)
    with Served(tokenizer, reply) as served:
        assert json.loads(post(served, "/api/chat", messages=USER).text.splitlines()[-1]) == {"error": "It died."}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/edits", "/v1/audio/speech", "/v1/fine_tuning/jobs"])
def test_endpoints_that_are_not_served(served: Served, path: str) -> None:
    refused = httpx.post(f"{served.url}{path}", json={})
    assert refused.status_code == 501
    assert refused.json()["error"]["code"] == "not_implemented"
    assert httpx.post(f"{served.url}/api/pull", json={}).json()["error"].startswith("/api/pull is not implemented")
    assert httpx.post(f"{served.url}/v1/embeddingsx", json={}).status_code == 404


def test_client(served: Served) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=served.url)
    whole = client.chat(model=MODEL, messages=USER, tools=[TOOL])
    assert whole.message.tool_calls[0].function.arguments == {"path": "a.txt"}
    pieces = list(client.chat(model=MODEL, messages=USER, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content == "Let me look."
    assert client.list().models[0].model == MODEL
    assert client.show(MODEL).capabilities
    with pytest.raises(ollama.ResponseError, match="not implemented"):
        client.embed(model=MODEL, input="x")
    client._client.close()
