"""Streamed answers of all protocols, read by clients that divide text into lines as Python's splitlines does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_calls import USER, post

from fakes import FakeEngine, Reply
from proa.text.tokenizer import Tokenizer

ANSWER = "one\u2028two\x85three\u2029Zürich"
CHAT = {"messages": USER, "stream": True, "max_tokens": 100}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "stream": True, "max_tokens": 100}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "Hi", "stream": True}),
        ("/api/chat", {"messages": USER}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_event_is_one_line(path: str, body: dict[str, Any], tokenizer: Tokenizer) -> None:
    answer = post(tokenizer, path, FakeEngine(Reply(tokenizer.encode(ANSWER))), json=body)
    lines = [line for line in answer.text.splitlines() if line and line != "data: [DONE]"]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith("event: ")]
    assert "\u2028two\x85three\u2029Z" in "".join(strings_in(events))


def strings_in(value: Any) -> list[str]:
    """The pieces of text of the answer, in order."""
    if isinstance(value, dict):
        return [text for key, one in value.items() for text in strings_in(one if key in KEYS else None)]
    if isinstance(value, list):
        return [text for one in value for text in strings_in(one)]
    return [value] if isinstance(value, str) else []


KEYS = ("choices", "delta", "text", "content", "message")
