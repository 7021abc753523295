"""Anthropic's client, as a user of it writes: messages, streams, tools, thinking. Run with the server's URL."""

from __future__ import annotations

import sys
from typing import Any

import anthropic

TOOL: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}


def main(url: str) -> None:
    question: Any = {"role": "user", "content": "weather?"}
    asked: dict[str, Any] = {
        "model": "claude-opus-4-8",
        "max_tokens": 1000,
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 900},
    }
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["scripted"]
        with client.messages.stream(messages=[question], **asked) as stream:
            kinds = [event.type for event in stream]
            first = stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds), kinds
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert call.input == {"city": "Zürich"}
        plain = client.messages.create(messages=[question], **asked)
        assert [block.model_dump(exclude={"id"}) for block in plain.content] == [
            block.model_dump(include=plain.content[i].model_dump(exclude={"id"}).keys())
            for i, block in enumerate(first.content)
        ]
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21"}]}
        history: Any = [
            question,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = client.messages.create(messages=history, **asked)
        assert [block.text for block in second.content] == ["It is 21 degrees."]
        counted = client.messages.count_tokens(model="x", messages=[question], tools=[TOOL])
        usage = plain.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        cut = client.messages.create(model="x", max_tokens=10_000_000, messages=[{"role": "user", "content": "hi"}])
        assert cut.content[0].text == "Hello!"


if __name__ == "__main__":
    main(sys.argv[1])
