"""Ollama's client, as a user of it writes: chat, generate, tools, formats, descriptions. Run with the server's URL."""

from __future__ import annotations

import sys
from typing import Any

import ollama


def get_weather(city: str) -> str:
    """Look up the weather.

    Args:
        city: where
    """
    return city


def main(url: str) -> None:
    client = ollama.Client(host=url, timeout=60)
    assert [model.model for model in client.list().models] == ["scripted"]
    assert [model.model for model in client.ps().models] == ["scripted"]
    assert client.show("scripted").capabilities == ["completion", "tools", "thinking"]
    weather: list[Any] = [{"role": "user", "content": "weather?"}]
    first = client.chat("scripted", weather, tools=[get_weather], think=True).message
    assert (first.thinking, first.content) == ("I must ask.", "One moment.")
    assert first.tool_calls
    assert first.tool_calls[0].function.arguments == {"city": "Zürich"}
    history = [*weather, first, {"role": "tool", "tool_name": "get_weather", "content": "21"}]
    assert client.chat("scripted", history, tools=[get_weather]).message.content == "It is 21 degrees."
    pieces = list(client.chat("scripted", weather, tools=[get_weather], stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "One moment."
    assert sum(len(piece.message.tool_calls or ()) for piece in pieces) == 1
    assert pieces[-1].done
    assert pieces[-1].done_reason == "stop"
    assert client.generate("scripted:latest", "hi").response == "Hello!"
    assert "".join(part.response for part in client.generate("scripted", "hi", stream=True)) == "Hello!"
    schema = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"],
              "additionalProperties": False}  # fmt: skip
    colour = client.chat("scripted", [{"role": "user", "content": "hi"}], format=schema, options={"num_predict": 50})
    assert "".join((colour.message.content or "").split()) == '{"colour":"red"}'
    refusal = ""
    try:
        client.embed("scripted", "hi")
    except ollama.ResponseError as error:
        refusal = str(error)
    assert "not implemented" in refusal


if __name__ == "__main__":
    main(sys.argv[1])
