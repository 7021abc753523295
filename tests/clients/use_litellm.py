"""litellm, as a user of it writes, over the protocols of OpenAI, Anthropic and Ollama. Run with the server's URL."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def check(model: str, base: str, has_reasoning: bool) -> None:
    asked: dict[str, Any] = {"model": model, "api_base": base, "api_key": "none", "timeout": 60, "max_tokens": 500}
    weather: list[Any] = [{"role": "user", "content": "weather?"}]
    first = litellm.completion(messages=weather, tools=[TOOL], **asked).choices[0]
    assert first.finish_reason == "tool_calls", (model, first)
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Zürich"}), model
    if has_reasoning:
        assert first.message.reasoning_content == "I must ask.", (model, first)
    pieces = list(litellm.completion(messages=weather, tools=[TOOL], stream=True, **asked))
    built = litellm.stream_chunk_builder(pieces, messages=weather)
    (streamed,) = built.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == {"city": "Zürich"}, model
    said = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "21"}
    history = [*weather, first.message.model_dump(exclude_none=True), said]
    second = litellm.completion(messages=history, tools=[TOOL], **asked)
    assert second.choices[0].message.content == "It is 21 degrees.", (model, second)
    assert second.usage.total_tokens > 0
    said_hello = litellm.completion(messages=[{"role": "user", "content": "hi"}], **asked)
    assert said_hello.choices[0].message.content == "Hello!", model


def main(url: str) -> None:
    litellm.telemetry = False
    check("openai/scripted", f"{url}/v1", True)
    check("hosted_vllm/scripted", f"{url}/v1", True)
    check("anthropic/scripted", url, True)
    check("ollama_chat/scripted", url, False)


if __name__ == "__main__":
    main(sys.argv[1])
