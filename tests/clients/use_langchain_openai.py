"""langchain-openai, as a user of it writes: chat, tools, structured output, responses. Run with the server's URL."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    colour: Literal["red"]


@tool
def get_weather(city: str) -> str:
    """Look up the weather."""
    return city


def loop(model: Any) -> None:
    with_tools = model.bind_tools([get_weather])
    first = with_tools.invoke("weather?")
    assert isinstance(first, AIMessage)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Zürich"})
    history = [HumanMessage("weather?"), first, ToolMessage("21", tool_call_id=call["id"])]
    assert with_tools.invoke(history).text == "It is 21 degrees."
    whole = None
    for piece in with_tools.stream("weather?"):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("get_weather", {"city": "Zürich"})]
    assert whole.usage_metadata["total_tokens"] > 0


def main(url: str) -> None:
    settings: dict[str, Any] = {
        "model": "scripted", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60,
    }  # fmt: skip
    model = ChatOpenAI(**settings, stream_usage=True)
    assert model.invoke("hi").content == "Hello!"
    assert [answer.content for answer in model.batch(["hi", "hi"])] == ["Hello!", "Hello!"]
    loop(model)
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(Colour, method=method).invoke("hi") == Colour(colour="red"), method
    loop(ChatOpenAI(**settings, use_responses_api=True))
    forced = model.bind_tools([get_weather], tool_choice="any").invoke("weather?")
    assert forced.response_metadata["finish_reason"] in ("tool_calls", "length")
    assert OpenAI(**settings, max_tokens=3).invoke("hi") is not None


if __name__ == "__main__":
    main(sys.argv[1])
