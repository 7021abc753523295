"""/v1/messages with tools and reasoning, as Claude Code sends and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fake_parser import FakeParser
from fakes import Reply, make_tokenizer
from proa.llm import AsyncLLM
from proa.server.anthropic_prompt import as_chat
from proa.server.anthropic_schema import CountTokensRequest, MessagesRequest
from proa.text.tokenizer import Tokenizer
from served import MODEL, Served

anthropic = pytest.importorskip("anthropic")

ANSWER = '[[think]]I need it.[[text]]Let me look.[[call read]]{"path": "a.txt"}[[call list]]{}'
BLOCKS = [
    {"type": "thinking", "thinking": "I need it."},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "a.txt"}},
    {"type": "tool_use", "id": "call_1", "name": "list", "input": {}},
]
TOOL = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}
MARK = {"cache_control": {"type": "ephemeral"}}
# The form of Claude Code's requests: its first one, and the one after a tool call.
FIRST: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 64_000,
    "system": [{"type": "text", "text": "You are an agent.", **MARK}, {"type": "text", "text": "Be brief."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Read a.txt.", **MARK}]}],
    "tools": [{**TOOL, "name": f"tool{i}"} for i in range(24)],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "me"},
    "stream": True,
}
SECOND: dict[str, Any] = {
    **FIRST,
    "messages": [
        *FIRST["messages"],
        {"role": "system", "content": "The file has changed."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I need it.", "signature": "cHJvYQ=="},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_0", "content": "Hello", **MARK},
                {"type": "text", "text": "And now?"},
            ],
        },
    ],
}


@pytest.fixture
def served(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(AsyncLLM, "answer_parser", lambda *_: FakeParser())
    with Served(tokenizer, Reply(tokenizer.encode(ANSWER)), accept_any_model=True) as server:
        yield server


def post(served: Served, body: dict[str, Any], path: str = "/v1/messages") -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json=body, params={"beta": "true"}, timeout=20)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line.startswith("data: ")]


def test_blocks_of_a_stream(served: Served) -> None:
    response = post(served, FIRST)
    assert response.status_code == 200, response.text
    assert response.headers["x-proa-ignored-fields"].split(", ") == [
        "context_management",
        "metadata",
        "output_config.effort",
        "cache_control",
        "max_tokens",
    ]
    events = events_of(response)
    assert events[0]["message"]["model"] == MODEL
    inner = [event for event in events[1:-2] if event["type"] != "ping"]
    deltas: dict[int, dict[str, str]] = {}
    order: list[tuple[str, int]] = []
    for event in inner:
        if event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            ((_, text),) = event["delta"].items()
            part = deltas.setdefault(event["index"], {})
            part[kind] = part.get(kind, "") + text
        else:
            order.append((event["type"], event["index"]))
    assert order == [(f"content_block_{what}", i) for i in range(4) for what in ("start", "stop")]
    starts = [event["content_block"] for event in inner if event["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_0", "name": "read", "input": {}},
        {"type": "tool_use", "id": "call_1", "name": "list", "input": {}},
    ]
    signature = deltas[0].pop("signature_delta")
    assert len(signature) > 40
    assert deltas == {
        0: {"thinking_delta": "I need it."},
        1: {"text_delta": "Let me look."},
        2: {"input_json_delta": '{"path": "a.txt"}'},
        3: {"input_json_delta": "{}"},
    }
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    again = {**FIRST, "messages": [*FIRST["messages"], {"role": "assistant", "content": [{**starts[0], "thinking": "x",
             "signature": signature}, {"type": "text", "text": "y"}]}]}  # fmt: skip
    assert post(served, again).status_code == 200


def test_client_reads_the_same_streamed_and_not(served: Served) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "max_tokens": 400, "messages": FIRST["messages"], "tools": [TOOL],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        plain = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            whole = stream.get_final_message()
    for answer in (plain, whole):
        assert answer.stop_reason == "tool_use"
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        assert blocks[0].pop("signature") == plain.content[0].signature
        assert blocks == BLOCKS


def chat_of(body: dict[str, Any]) -> Any:
    kept = {name: value for name, value in body.items() if name in CountTokensRequest.model_fields}
    return as_chat(CountTokensRequest.model_validate(kept))


def test_conversation_in_the_templates_form() -> None:
    chat = chat_of(SECOND)
    assert chat.messages == [
        {"role": "system", "content": [{"type": "text", "text": t} for t in ("You are an agent.", "Be brief.")]},
        {"role": "user", "content": "Read a.txt."},
        {"role": "system", "content": "The file has changed."},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "I need it.",
            "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "read", "arguments": '{"path":"a.txt"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "name": "read", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ]
    assert chat.tools[3] == {
        "type": "function",
        "function": {"name": "tool3", "description": "Reads a file.", "parameters": {"type": "object"}},
    }
    assert chat.template_kwargs == {}
    assert chat.add_generation_prompt


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}, "title": "T"}],
         "T\nd"),
        ([{"type": "document", "source": {"type": "content", "content": "d"}}], "d"),
        ([{"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "a"}]}],
         "T (s)\na"),
    ],
)  # fmt: skip
def test_tool_results(content: Any, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "x", "content": content}
    asked = {"messages": [{"role": "user", "content": [result, {**result, "is_error": True}]}]}
    assert [m["content"] for m in chat_of(asked).messages] == [text, f"Error: {text}"]


@pytest.mark.parametrize(("thinking", "on"), [("enabled", True), ("disabled", False)])
def test_thinking_switches_the_template(thinking: str, on: bool) -> None:
    asked = {"messages": FIRST["messages"], "thinking": {"type": thinking, "budget_tokens": 2000}}
    assert chat_of(asked).template_kwargs == {"enable_thinking": on, "thinking": on}


def test_tools_of_anthropics_servers_are_named(served: Served) -> None:
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    response = post(served, {**FIRST, "stream": False, "max_tokens": 100, "tools": tools})
    assert response.status_code == 200
    assert "tools[1]" in response.headers["x-proa-ignored-fields"].split(", ")
    assert chat_of({**FIRST, "tools": tools[1:]}).tools is None
    assert chat_of({**FIRST, "tool_choice": {"type": "none"}}).tools is None


def test_count_tokens_counts_tools(tmp_path: Any) -> None:
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with Served(Tokenizer.load(make_tokenizer(tmp_path, template))) as served:
        while httpx.get(f"{served.url}/health").status_code != 200:
            pass
        counts = [
            post(served, {"messages": FIRST["messages"], **tools}, "/v1/messages/count_tokens").json()["input_tokens"]
            for tools in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}})
        ]
    assert counts[0] == counts[2] < counts[1] - 20


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "image in a result": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0]: Content blocks of type 'image'",
    ),
    "PDF": (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
        "source of type 'base64'",
    ),
    "input no object": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}]},
        "messages[0].content[0].input",
    ),
    "signature": (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": "<b>"}]}]},
        "messages[0].content[0].signature",
    ),
    "no schema": ({"tools": [{"name": "f"}]}, "tools[0]"),
    "unknown choice": ({"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type"),
    "choice without name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    "unknown thinking": ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    "thinking without budget": ({"thinking": {"type": "enabled"}}, "thinking"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields(name: str) -> None:
    changes, named = WRONG[name]
    from pydantic import ValidationError

    from proa.server.errors import from_validation

    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate({"messages": FIRST["messages"], "max_tokens": 5, **changes})
    assert named in str(from_validation(caught.value))


def test_models_in_anthropics_form(served: Served) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = httpx.get(f"{served.url}/v1/models", headers=headers).json()
    (card,) = listed["data"]
    assert (card["type"], card["id"], card["display_name"]) == ("model", MODEL, MODEL)
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, MODEL)
    assert httpx.get(f"{served.url}/v1/models/{MODEL}", headers=headers).json() == card
    assert httpx.get(f"{served.url}/v1/models").json()["object"] == "list"
    with anthropic.Anthropic(base_url=served.url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_root(served: Served, method: str) -> None:
    assert httpx.request(method, f"{served.url}/").status_code == 200
