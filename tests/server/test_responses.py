"""/v1/responses: events, items, tools, stored responses; OpenAI's client reads them."""

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
from proa.server.errors import ApiError
from proa.server.responses_prompt import as_chat, seal
from proa.server.responses_schema import ResponsesRequest
from proa.text.tokenizer import Tokenizer
from served import MODEL, Served

openai = pytest.importorskip("openai")

ANSWER = '[[think]]I need it.[[text]]Let me look.[[call fs__read]]{"path": "a"}[[call patch]]{"input": "*** go"}'
TOOLS = [
    {"type": "namespace", "name": "fs", "description": "Files", "tools": [
        {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}]},
    {"type": "custom", "name": "patch", "description": "Applies a patch.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
    {"type": "web_search", "external_web_access": False},
]  # fmt: skip
# The form of Codex' requests.
ASKED: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read a."}]},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "x",
    "metadata": {"trace": "7"},
    "client_metadata": {"x": "y"},
    "text": {"verbosity": "low"},
}


@pytest.fixture
def served(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(AsyncLLM, "answer_parser", lambda *_: FakeParser())
    with Served(tokenizer, Reply(tokenizer.encode(ANSWER), cached_tokens=3), stored_responses=2) as server:
        yield server


def post(served: Served, **changes: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/responses", json={**ASKED, **changes}, timeout=20)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    frames = [frame.split("\n") for frame in response.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    return events


def test_events_of_a_stream(served: Served) -> None:
    response = post(served)
    assert response.status_code == 200, response.text
    assert response.headers["x-proa-ignored-fields"].split(", ") == [
        "prompt_cache_key",
        "client_metadata",
        "tools[2]",
        "reasoning.summary",
        "text.verbosity",
    ]
    events = events_of(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    order: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if not order or order[-1] != name:
            order.append(name)
    assert order == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    whole = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert whole["output"] == done
    assert [item["id"] for item in done] == [item["id"] for item in added]
    assert len({item["id"] for item in done}) == 4
    reasoning, message, call, custom = done
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I need it."}]
    assert reasoning["encrypted_content"] == seal("I need it.")
    assert message["content"][0]["text"] == "Let me look."
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "fs", "read")
    assert (call["call_id"], call["arguments"]) == ("call_0", '{"path": "a"}')
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** go")
    for kind in ("reasoning_text", "output_text", "function_call_arguments", "custom_tool_call_input"):
        joined = "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        (end,) = [event for event in events if event["type"] == f"response.{kind}.done"]
        assert joined == end.get("text", end.get("arguments", end.get("input")))
        assert end["item_id"] == done[end["output_index"]]["id"]
    assert whole["metadata"] == events[0]["response"]["metadata"] == {"trace": "7"}
    usage = whole["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


def test_client_reads_the_same_streamed_and_not(served: Served) -> None:
    asked = {name: value for name, value in ASKED.items() if name not in ("stream", "client_metadata")}
    plain = served.client.responses.create(**asked)
    with served.client.responses.stream(**asked) as stream:
        types = [event.type for event in stream]
        whole = stream.get_final_response()
    assert types[0] == "response.created"
    assert plain.output_text == whole.output_text == "Let me look."
    for answer in (plain, whole):
        assert (answer.status, answer.model) == ("completed", MODEL)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "custom_tool_call"]


def test_one_call_without_parallel_calls(served: Served) -> None:
    output = post(served, stream=False, parallel_tool_calls=False).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]


def test_an_answer_at_its_limit_is_incomplete(served: Served) -> None:
    whole = post(served, stream=False, max_output_tokens=20).json()
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][-1]["status"] == "incomplete"
    assert events_of(post(served, max_output_tokens=20))[-1]["type"] == "response.incomplete"
    cut = post(served, stream=False, max_output_tokens=10**6)
    assert "max_output_tokens" in cut.headers["x-proa-ignored-fields"]


def chat_of(**changes: Any) -> Any:
    request = ResponsesRequest.model_validate({"input": "Hi", **changes})
    return as_chat(request, request.input)


def test_items_in_the_templates_form() -> None:
    items = [
        *ASKED["input"],
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("I need it.")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "1", "name": "read", "namespace": "fs", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "*** go"},
        {"type": "function_call_output", "call_id": "1", "output": "Hello"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
    ]
    chat = chat_of(instructions="You are an agent.", input=items, tools=TOOLS, reasoning={"effort": "high"})
    calls = [
        {"id": "1", "type": "function", "function": {"name": "fs__read", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "patch", "arguments": '{"input":"*** go"}'}},
    ]
    assert chat.messages == [
        {"role": "system", "content": "You are an agent.\n\nAsk first."},
        {"role": "user", "content": "Read a."},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "I need it.", "tool_calls": calls},
        {"role": "tool", "content": "Hello", "tool_call_id": "1"},
        {"role": "tool", "content": "done", "tool_call_id": "2"},
        {"role": "assistant", "content": "Done.", "reasoning_content": ""},
        {"role": "user", "content": "Thanks."},
    ]
    assert [tool["function"]["name"] for tool in chat.tools] == ["fs__read", "patch"]
    assert "start: x" in chat.tools[1]["function"]["description"]
    assert chat.template_kwargs == {"reasoning_effort": "high", "enable_thinking": True}


def test_allowed_tools() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "patch"}]}
    assert [tool["function"]["name"] for tool in chat_of(tools=TOOLS, tool_choice=choice).tools] == ["patch"]


def test_stored_responses_are_continued(served: Served) -> None:
    asked: dict[str, Any] = {"store": True, "stream": False, "tools": []}
    first = post(served, **asked).json()
    output = {"type": "function_call_output", "call_id": "call_0", "output": "Hello"}
    second = post(served, **asked, previous_response_id=first["id"], input=[output]).json()
    assert second["previous_response_id"] == first["id"]
    prompt = served.tokenizer.decode(served.engine.requests[-1].tokens, skip_special_tokens=False)
    assert prompt.index("Read a.") < prompt.index("Let me look.") < prompt.index("Hello")
    for _ in range(2):
        post(served, **asked)
    lost = post(served, **asked, previous_response_id=first["id"])
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "previous_response_not_found")
    unstored = post(served, **{**asked, "store": False}).json()
    assert post(served, **asked, previous_response_id=unstored["id"]).status_code == 400


def test_equal_request_ids_are_different_responses(served: Served) -> None:
    headers, asked = {"x-request-id": "trace-1"}, {"model": MODEL, "max_output_tokens": 4}
    url = f"{served.url}/v1/responses"
    first, second = (httpx.post(url, json={**asked, "input": text}, headers=headers).json() for text in ("One", "Two"))
    httpx.post(url, json={**asked, "input": "More", "previous_response_id": first["id"]}, headers=headers)
    prompt = served.tokenizer.decode(served.engine.requests[-1].tokens, skip_special_tokens=False)
    assert "One" in prompt
    assert "Two" not in prompt
    assert first["id"] != second["id"]


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"store": True}])
def test_without_stored_responses(tokenizer: Tokenizer, field: dict[str, Any]) -> None:
    with Served(tokenizer, Reply(tokenizer.encode("Hi")), stored_responses=0) as served:
        while httpx.get(f"{served.url}/health").status_code != 200:
            pass
        refused = post(served, **field)
        assert refused.status_code == 400
        assert "--stored-responses 0" in refused.json()["error"]["message"]
        assert post(served, store=None).status_code == 200


def test_an_error_in_the_middle_is_a_failed_response(tokenizer: Tokenizer) -> None:
    with Served(
        tokenizer, Reply(tokenizer.encode("Hello quick fox"), error=EngineDead("It died."), error_after=1)
    ) as served:
        events = events_of(post(served))
    last = events[-1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert set(events[0]["response"]) == set(last["response"])
    assert last["response"]["error"] == {"code": "engine_dead", "message": "It died."}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "reasoning", "encrypted_content": "proa.x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [1]}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": True}}, "tool_choice.tools"),
        ({"tools": [{"type": "namespace", "name": "fs", "tools": "all"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "fs", "tools": [None]}]}, "tools[0].tools"),
        ({"tools": [{"type": "custom", "name": "f", "description": True}]}, "tools[0].description"),
        ({"tools": [{"type": "custom", "name": "f", "format": True}]}, "tools[0].format"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters"),
    ],
)
def test_wrong_fields(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_of(**changes)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_error_counts_only_the_items_of_this_request() -> None:
    request = ResponsesRequest.model_validate({"input": [{"type": "item_reference", "id": "x"}]})
    with pytest.raises(ApiError) as caught:
        as_chat(request, [{"role": "user", "content": "Hi"}, *request.input])
    assert caught.value.param == "input[0]"


def test_a_type_of_null_is_not_given() -> None:
    item = {"type": None, "role": "user", "content": "Hi"}
    assert chat_of(input=[item]).messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [("background", True), ("conversation", "x"), ("n", 2), ("stop", ["x"]), ("max_output_tokens", 0),
     ("max_output_tokens", 10**12),
     ("text", {"format": {"type": "json_schema"}}), ("input", []),
     ("metadata", {"trace": 7}), ("metadata", {"trace": "x" * 513}), ("metadata", {"x" * 65: ""}),
     ("metadata", {str(i): "" for i in range(17)})],
)  # fmt: skip
def test_refused_fields(served: Served, field: str, value: Any) -> None:
    refused = post(served, **{field: value})
    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"]
