"""Tools and messages that a chat template does not take as they are: what the model gets, what the headers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_calls import CHAT, USER, post

from fakes import CHATML, FakeEngine, Reply, make_tokenizer
from proa.text.tokenizer import Tokenizer
from proa.types import Tags

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"zip": {"type": "string"}}}}}
]
CALL = 'So:\n<tool_call>\n{"name": "get_weather", "arguments": {"zip": "007"}}\n</tool_call>'
STRICT = (
    "{% for m in messages %}{% if loop.index0 and m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
    "{% endfor %}" + CHATML
)


def test_tools_in_a_system_message(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(Reply(tokenizer.encode(CALL)))
    answer = post(tokenizer, CHAT, engine, json={"messages": USER, "tools": TOOLS})
    assert answer.headers["x-proa-tools"] == "system-message"
    assert "x-proa-messages" not in answer.headers
    prompt = tokenizer.decode(engine.requests[0].tokens, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\n# Tools")
    assert json.dumps(TOOLS[0]["function"]) in prompt
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "So:"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"zip": "007"}'}
    assert choice["finish_reason"] == "tool_calls"


def test_streamed_deltas(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(Reply(tokenizer.encode(CALL)))
    body = {"messages": USER, "tools": TOOLS, "stream": True}
    lines = post(tokenizer, CHAT, engine, json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "So:"
    begun, arguments = (delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
    number = begun[0].pop("id")
    assert number.startswith("call_")
    assert begun == [{"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}]
    assert arguments == [{"index": 0, "function": {"arguments": '{"zip": "007"}'}}]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


HALF = CALL.replace("007", "\\ud83d")  # of a pair of surrogates: no text has it alone
CLAUDES = [{"name": "get_weather", "input_schema": {"type": "object"}}]


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        (CHAT, {"tools": TOOLS}, '{\\"zip\\": \\"\ufffd\\"}'),
        ("/v1/messages", {"tools": CLAUDES, "max_tokens": 999}, '"input":{"zip":"\ufffd"}'),
        ("/api/chat", {"tools": TOOLS, "stream": False}, '"arguments":{"zip":"\ufffd"}'),
    ],
    ids=["OpenAI", "Anthropic", "Ollama"],
)
def test_arguments_with_half_a_character(path: str, body: dict[str, Any], found: str, tokenizer: Tokenizer) -> None:
    """JSON may escape half of a surrogate pair, which cannot be written as UTF-8 nor read in the next request."""
    answer = post(tokenizer, path, FakeEngine(Reply(tokenizer.encode(HALF))), json={"messages": USER, **body})
    assert answer.status_code == 200, answer.text
    assert found in answer.text


def test_an_answer_that_ends_with_its_call_is_not_generated_further(tokenizer: Tokenizer) -> None:
    """The other answer of n 2 ends by itself; then the request has ended."""
    called, plain = tokenizer.encode(f"{CALL}\n{CALL}"), tokenizer.encode("Hello")
    engine = FakeEngine(lambda request: Reply(called if request.id.endswith("-0") else plain, delay_s=0.001))
    body = {"messages": USER, "tools": TOOLS, "n": 2, "parallel_tool_calls": False}
    first, second = post(tokenizer, CHAT, engine, json=body).json()["choices"]
    assert [first["finish_reason"], second["finish_reason"]] == ["tool_calls", "stop"]
    assert len(first["message"]["tool_calls"]) == 1
    assert engine.aborted == [engine.requests[0].id]


def test_without_tools_nothing_is_rewritten(tokenizer: Tokenizer) -> None:
    answer = post(tokenizer, CHAT, FakeEngine(Reply(tokenizer.encode(CALL))), json={"messages": USER})
    assert not {"x-proa-tools", "x-proa-messages"} & set(answer.headers)
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}


def test_messages_in_an_order_that_the_template_refuses(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer(tmp_path, STRICT))
    engine = FakeEngine(Reply(tokenizer.encode("Hi")))
    late = {"role": "developer", "content": "Be brief."}
    answer = post(tokenizer, CHAT, engine, json={"messages": [*USER, late]})
    assert answer.headers["x-proa-messages"] == "merged"
    prompt = tokenizer.decode(engine.requests[0].tokens, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": TOOLS, "functions": []}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "now"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "no"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": True}}}, "tool_choice"),
    ],
)
def test_refusals(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    answer = post(tokenizer, CHAT, json={"messages": USER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("budget", "named"), [(5, "thinking_token_budget"), (-1, None), (None, None)])
def test_a_budget_without_reasoning_is_named(tokenizer: Tokenizer, budget: int | None, named: str | None) -> None:
    engine = FakeEngine(Reply(tokenizer.encode("Hi")))
    answer = post(tokenizer, CHAT, engine, json={"messages": USER, "thinking_token_budget": budget})
    assert answer.headers.get("x-proa-ignored-fields") == named
    assert engine.requests[0].sampling.thinking is None


def test_a_constrained_answer_of_gpt_oss_is_a_final_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer(tmp_path, "{{ '<|channel|><|message|>' if tools }}" + CHATML))
    answer_text = '<|channel|>final<|message|>{"a": 1}'
    engine = FakeEngine(Reply(tokenizer.encode(answer_text)))
    body = {"messages": USER, "response_format": {"type": "json_object"}}
    answer = post(tokenizer, CHAT, engine, json=body)
    assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    constraint = engine.requests[0].sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.param) == ("tags", "response_format")
    (tag,) = msgspec.json.decode(constraint.text, type=Tags).tags
    assert (tag.begin, tag.end, tag.content.kind) == ("<|channel|>final<|message|>", "", "json")
    post(tokenizer, CHAT, engine, json={**body, "tools": TOOLS})
    constraint = engine.requests[1].sampling.constraint
    assert constraint is not None
    begins = [tag.begin for tag in msgspec.json.decode(constraint.text, type=Tags).tags]
    assert begins == [tag.begin, "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "tools": TOOLS, "response_format": {"type": "json_object"}}),
        ("/v1/messages", {"messages": USER, "tools": CLAUDES, "max_tokens": 9,
                          "output_config": {"format": {"type": "json_object"}}}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "get_weather"}],
                           "text": {"format": {"type": "json_object"}}}),
        ("/api/chat", {"messages": USER, "tools": TOOLS, "format": "json"}),
    ],
    ids=["chat", "messages", "responses", "Ollama"],
)  # fmt: skip
def test_a_constrained_answer_may_be_a_call(path: str, body: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Agents send tools and the form of the final answer with each request."""
    engine = FakeEngine(Reply(tokenizer.encode("{}")))
    assert post(tokenizer, path, engine, json=body).status_code == 200
    constraint = engine.requests[0].sampling.constraint
    assert constraint is not None
    tags = msgspec.json.decode(constraint.text, type=Tags)
    assert [tag.begin for tag in tags.tags] == ["", '<tool_call>\n{"name": "get_weather", "arguments": ']
    assert (tags.triggers, tags.at_most) == ((), 1)
    no_tools = {**body, "tools": None}
    assert post(tokenizer, path, engine, json=no_tools).status_code == 200
    constraint = engine.requests[1].sampling.constraint
    assert constraint is not None
    assert constraint.kind == "json"
