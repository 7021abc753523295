"""OpenAI's client, as a user of it writes: chat, tools, structured output, responses. Run with the server's URL."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import pydantic


class Colour(pydantic.BaseModel):
    colour: Literal["red"]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scripted", "tools": [TOOL]}
    first = client.chat.completions.create(messages=user("weather?"), **asked).choices[0].message
    assert first.tool_calls
    assert json.loads(first.tool_calls[0].function.arguments) == {"city": "Zürich"}
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21"}
    history = [*user("weather?"), first.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(messages=history, **asked).choices[0].message.content == "It is 21 degrees."
    with client.chat.completions.stream(messages=user("weather?"), **asked) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_completion()
    assert whole.choices[0].message.tool_calls
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
    parsed = client.chat.completions.parse(model="scripted", messages=user("hi"), response_format=Colour)
    assert parsed.choices[0].message.parsed == Colour(colour="red")
    usage = client.chat.completions.create(
        model="scripted", messages=user("hi"), stream=True, stream_options={"include_usage": True}
    )
    counts = [chunk.usage for chunk in usage if chunk.usage]
    assert len(counts) == 1
    assert counts[0].total_tokens > 0


def responses(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", **TOOL["function"]}
    first = client.responses.create(model="scripted", input="weather?", tools=[function])
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call"], kinds
    output: Any = [{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "21"}]
    second = client.responses.create(model="scripted", input=output, previous_response_id=first.id, tools=[function])
    assert second.output_text == "It is 21 degrees."
    with client.responses.stream(model="scripted", input="weather?", tools=[function]) as stream:
        numbers = [event.sequence_number for event in stream]
        assert [item.type for item in stream.get_final_response().output] == kinds
    assert numbers == list(range(len(numbers)))
    parsed = client.responses.parse(model="scripted", input="hi", text_format=Colour)
    assert parsed.output_parsed == Colour(colour="red")


async def at_once(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = [client.chat.completions.create(model="any-name", messages=user("hi")) for _ in range(4)]
        answers = await asyncio.gather(*asked)
    assert {answer.choices[0].message.content for answer in answers} == {"Hello!"}
    assert {answer.model for answer in answers} == {"scripted"}


def main(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["scripted"]
        assert client.models.retrieve("scripted").id == "scripted"
        chat(client)
        responses(client)
        assert client.completions.create(model="scripted", prompt="hi", max_tokens=3).choices[0].finish_reason
        refusal = ""
        try:
            client.embeddings.create(model="scripted", input="hi")
        except openai.InternalServerError as error:
            refusal = str(error)
        assert "embeddings" in refusal
    asyncio.run(at_once(url))


if __name__ == "__main__":
    main(sys.argv[1])
