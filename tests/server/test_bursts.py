"""A server that is behind its engine gets several tokens at once: clients of every protocol read the same answer, and
the same usage, as from one token after another."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from http_calls import CHAT, COMPLETIONS, post

from fake_parser import FakeParser
from fakes import FakeEngine, Reply
from proa.llm import AsyncLLM
from proa.text.tokenizer import Tokenizer

ANSWER = '[[think]]I need it. 😀[[text]]Let me look, then[[call read]]{"path": "a"}[[call patch]]{"x": 1}[[text]] done'
USER = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("read", "patch")]
WITH_USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": USER, "tools": FUNCTIONS, **WITH_USAGE}),
    "chat, logprobs": (
        CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, **WITH_USAGE}
    ),
    "chat, one call": (CHAT, {"messages": USER, "tools": FUNCTIONS, "parallel_tool_calls": False}),
    "chat, stop": (CHAT, {"messages": USER, "stop": ["look, th"], **WITH_USAGE}),
    "completions": (COMPLETIONS, {"prompt": "Hi", "n": 2, "max_tokens": 200, "logprobs": 2, **WITH_USAGE}),
    "messages": (
        "/v1/messages", {"max_tokens": 200, "messages": USER, "tools": [{"name": "read", "input_schema": SCHEMA}]}
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}]},
    ),
    "ollama": ("/api/chat", {"messages": USER, "tools": FUNCTIONS}),
}  # fmt: skip
REAL = {"chat, one call"}  # with the parser of the tokenizer's template, which gives whole calls
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
CALLS = f"I look.\n{CALL}\n{CALL}"
_VARIES = re.compile(r"(^|_)(id|created|created_at|signature|duration|sequence_number|time_ms|completed_at)$")


def steady(value: Any) -> Any:
    """The value without what differs between two answers."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if not _VARIES.search(key)}
    return [steady(item) for item in value] if isinstance(value, list) else value


GROWING = {
    "content", "reasoning_content", "thinking", "text", "arguments", "delta", "partial_json", "tool_calls", "logprobs",
    "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset",
}  # fmt: skip


def folded(objects: list[Any]) -> list[Any]:
    """Add up the stream of chat, completions and Ollama, for each choice; of other protocols, neighbouring objects that
    differ in a text alone."""
    found: dict[Any, Any] = {}
    for number, one in enumerate(objects):
        (choice,) = one.get("choices") or [{}]
        kind = one.get("type") or one.get("object") or "ollama"
        key = (kind, choice.get("index")) if "type" not in one else (kind, number)
        last = next(reversed(found), None)
        if "type" in one and last is not None and last[0] == kind and _alike(found[last], one):
            key = last
        found[key] = _sum(found[key], one) if key in found else one
    return list(found.values())


def _alike(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return {k: v for k, v in first.items() if k != "delta"} == {k: v for k, v in second.items() if k != "delta"}


def _sum(first: Any, second: Any, key: str = "") -> Any:
    """Add `second`: texts and lists grow, of anything else the last one counts that is not None."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first | {k: _sum(first.get(k), v, k) for k, v in second.items()}
    if isinstance(first, list) and isinstance(second, list) and key not in GROWING:
        return [_sum(a, b, key) for a, b in zip(first, second, strict=True)]
    if key == "tool_calls" and first and second and "index" in first[-1]:
        same = first[-1]["index"] == second[0]["index"]
        return [*first[:-1], _sum(first[-1], second[0]), *second[1:]] if same else first + second
    if key in GROWING and type(first) is type(second) and isinstance(first, str | list):
        return first + second
    return first if second is None else second


def streamed(tokenizer: Tokenizer, name: str, tokens_per_event: int) -> Any:
    path, body = REQUESTS[name]
    text = CALLS if name in REAL else ANSWER
    engine = FakeEngine(Reply(tokenizer.encode(text), tokens_per_event=tokens_per_event, cached_tokens=1))
    answer = post(tokenizer, path, engine, json={"model": "any", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return folded([steady(json.loads(line)) for line in lines if line.startswith("{")])


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("tokens_per_event", [2, 3, 7, 1000])
def test_the_same_answer(
    name: str, tokens_per_event: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    if name not in REAL:
        monkeypatch.setattr(AsyncLLM, "answer_parser", lambda *_: FakeParser())
    whole, one_by_one = streamed(tokenizer, name, tokens_per_event), streamed(tokenizer, name, 1)
    assert whole == one_by_one
    assert "look" in json.dumps(whole)
