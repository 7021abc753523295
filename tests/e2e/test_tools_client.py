"""Tools and reasoning through OpenAI's client, `proa serve` and a real engine; the model says what a script says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import serving

from engine_forks import EngineForks
from scripted_model import write_scripted_model

openai = pytest.importorskip("openai")

CITY = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🦊"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
SCRIPTS: dict[str, Any] = {
    "": "Hello!\n",
    "weather?": [f"<think>\nI must ask.\n</think>\n\nOne moment.\n{CITY}", "It is 21 degrees."],
    "both?": f"{CITY}\n{TIME}",
    "many?": "\n".join([CITY, *[TIME] * 60]),
    "syntax?": ("Write ", "<tool", "_call>", " to call."),
    "cut": CITY,
    "long?": "<think>\n" + "I could go on and on. " * 20 + "</think>\n\nDone.",
    "think json": '<think>\nWhich?\n</think>{"a": 1}',
    "joke": "<think>Hm.</think>\n\nA proa walks into a bar.",
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    for name, key in (("get_weather", "city"), ("get_time", "zone"))
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, engine_forks: EngineForks | None) -> Iterator[dict[str, Any]]:
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPTS)
    flags = ("--context=4096", "--gpu=none", "--max-batch-tokens=128", "--no-prefix-cache")
    with serving(folder, *flags, forks=engine_forks) as (_, loaded):
        yield loaded


@pytest.fixture(scope="module")
def client(report: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{report['url']}/v1", api_key="none", max_retries=0, timeout=60) as shared:
        yield shared


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **more)


def test_the_start_up_table_says_which_parsers(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["ready"]["decisions"]}
    assert (rows["tool calls"]["got"], rows["reasoning"]["got"]) == ("hermes", "qwen3")
    assert "the chat template has <tool_call>" in rows["tool calls"]["why"]


def test_a_call(client: openai.OpenAI) -> None:
    answer = ask(client, "weather?", tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == "I must ask."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Zürich 🦊"}
    assert call.id.startswith("call_")
    assert 4 <= answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_a_streamed_call(client: openai.OpenAI) -> None:
    """The client's own accumulator puts the deltas together."""
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": "weather?"}]
    reasoning = ""
    with client.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                reasoning += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, reasoning) == ("One moment.", "I must ask.")
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Zürich 🦊"}


def test_two_calls_or_the_first_alone(client: openai.OpenAI) -> None:
    both = ask(client, "both?", tools=TOOLS)
    assert [c.function.name for c in both.choices[0].message.tool_calls] == ["get_weather", "get_time"]
    assert both.choices[0].message.content is None
    assert len({c.id for c in both.choices[0].message.tool_calls}) == 2
    one = ask(client, "both?", tools=TOOLS, parallel_tool_calls=False)
    assert [c.function.name for c in one.choices[0].message.tool_calls] == ["get_weather"]
    assert one.choices[0].finish_reason == "tool_calls"
    several = ask(client, "both?", tools=TOOLS, parallel_tool_calls=False, n=2)
    assert [len(c.message.tool_calls) for c in several.choices] == [1, 1]


def test_calls_after_the_first_are_not_generated(client: openai.OpenAI) -> None:
    """Sixty of them: the engine is stopped by the server, which on a busy machine may be late by a call or two."""
    many = ask(client, "many?", tools=TOOLS)
    assert len(many.choices[0].message.tool_calls) == 61
    one = ask(client, "many?", tools=TOOLS, parallel_tool_calls=False)
    assert [c.function.name for c in one.choices[0].message.tool_calls] == ["get_weather"]
    assert one.usage.completion_tokens < many.usage.completion_tokens


def test_a_tool_loop(client: openai.OpenAI) -> None:
    """The second turn's prompt has the call, its reasoning and its result."""
    first = ask(client, "weather?", tools=TOOLS).choices[0].message
    messages: Any = [
        {"role": "user", "content": "weather?"},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21"},
    ]
    model = client.models.list().data[0].id
    second = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It is 21 degrees.")
    assert second.message.tool_calls is None


def test_the_older_form(client: openai.OpenAI) -> None:
    functions = [tool["function"] for tool in TOOLS]
    answer = ask(client, "both?", functions=functions).choices[0]
    assert answer.finish_reason == "function_call"
    assert answer.message.function_call.name == "get_weather"
    messages: Any = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": "{}"}},
        {"role": "function", "name": "get_weather", "content": "21"},
    ]
    model = client.models.list().data[0].id
    after = client.chat.completions.create(model=model, messages=messages, functions=functions).choices[0]
    assert after.message.content == "It is 21 degrees."


def test_a_call_that_is_cut_off_is_text(client: openai.OpenAI) -> None:
    choice = ask(client, "cut", tools=TOOLS, max_tokens=6).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith('<tool_call>\n{"name"')


def test_text_that_looks_like_a_token(client: openai.OpenAI) -> None:
    choice = ask(client, "syntax?", tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "Write <tool_call> to call.")


def test_without_tools(client: openai.OpenAI) -> None:
    plain = ask(client, "hi")
    assert plain.choices[0].message.content == "Hello!\n"
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(client, "both?", **more).choices[0]
        assert choice.message.content == f"{CITY}\n{TIME}"
        assert choice.finish_reason == "stop"


def test_a_stop_string_beside_the_delimiters(client: openai.OpenAI) -> None:
    choice = ask(client, "joke", stop=["bar"]).choices[0]
    assert choice.message.content.strip() == "A proa walks into a"
    assert choice.message.reasoning_content == "Hm."
    assert choice.finish_reason == "stop"


def test_logprobs_cover_all_tokens(client: openai.OpenAI) -> None:
    answer = ask(client, "weather?", tools=TOOLS, logprobs=True)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert "".join(e.token for e in entries) == SCRIPTS["weather?"][0]


def test_forced_calls(client: openai.OpenAI) -> None:
    """The model would say "One moment."; the grammar leaves it no other text than a call after its reasoning."""
    for choice, names in (
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            },
            {"get_time"},
        ),
    ):
        whole = ask(client, "weather?", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=300)
        answer = whole.choices[0]
        assert answer.finish_reason in ("tool_calls", "length")
        if answer.finish_reason == "tool_calls":
            (call,) = answer.message.tool_calls
            assert call.function.name in names
            required = {"get_weather": "city", "get_time": "zone"}[call.function.name]
            assert isinstance(json.loads(call.function.arguments)[required], str)
        else:
            assert answer.message.content.startswith('<tool_call>\n{"name": "get_')


def test_forced_calls_of_other_protocols(client: openai.OpenAI, report: dict[str, Any]) -> None:
    """The model would tell a joke. Its reasoning comes before the call."""
    url, name = report["url"], "get_time"
    message = {"role": "user", "content": "joke"}
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    asked = {"max_tokens": 300, "messages": [message], "tools": tools, "tool_choice": {"type": "tool", "name": name}}
    answer = httpx.post(f"{url}/v1/messages", json=asked, timeout=60).json()
    thinking, block = answer["content"]
    assert thinking["thinking"] == "Hm."
    if answer["stop_reason"] == "tool_use":
        assert block["name"] == name
        assert isinstance(block["input"]["zone"], str)
    else:
        assert block["text"].startswith(f'<tool_call>\n{{"name": "{name}"')
    functions: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice: Any = {"type": "function", "name": name}
    response = client.responses.create(
        model="m", input=[message], tools=functions, tool_choice=choice, max_output_tokens=300
    )
    assert response.output[0].type == "reasoning"
    if response.status == "completed":
        assert [(item.type, item.name) for item in response.output[1:]] == [("function_call", name)]
    else:
        assert response.output_text.startswith(f'<tool_call>\n{{"name": "{name}"')


def test_a_budget_of_reasoning(client: openai.OpenAI, report: dict[str, Any]) -> None:
    """What the model says after its reasoning was closed is not its script; here that it reasons no longer matters."""
    free = ask(client, "long?").usage.completion_tokens_details.reasoning_tokens
    assert free > 100
    whole = ask(client, "long?", extra_body={"thinking_token_budget": 20}, max_tokens=200)
    message, used = whole.choices[0].message, whole.usage.completion_tokens_details.reasoning_tokens
    assert message.reasoning_content.startswith("I could go on")
    assert message.reasoning_content.endswith("I have to give the solution based on the thinking directly now.")
    assert "I could go on" not in (message.content or "")
    assert 20 < used < free
    none = ask(client, "long?", extra_body={"thinking_token_budget": 0}, max_tokens=200).choices[0].message
    assert none.reasoning_content.startswith("Considering the limited time")
    generous = ask(client, "long?", extra_body={"thinking_token_budget": 1000}).choices[0].message
    assert generous.content == "Done."
    thinking = {"type": "enabled", "budget_tokens": 20}
    asked = {"max_tokens": 200, "messages": [{"role": "user", "content": "long?"}], "thinking": thinking}
    answered = httpx.post(f"{report['url']}/v1/messages", json=asked, timeout=60)
    assert "x-proa-ignored-fields" not in answered.headers
    assert answered.json()["content"][0]["thinking"] == message.reasoning_content


def test_progress_of_a_long_prompt(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "far away " * 600}], "n": 2}
    for more in ({}, {"return_progress": True}):
        chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=more))
        found = [c.prompt_progress for c in chunks if c.model_extra and "prompt_progress" in c.model_extra]
        assert all(not c.choices for c in chunks if c.model_extra and "prompt_progress" in c.model_extra)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices and not c.choices[0].index)
        assert bool(found) == bool(more)
    *parts, whole = found
    done = [progress["processed"] for progress in found]
    assert done == sorted(done)
    assert all(p["cache"] <= p["processed"] < p["total"] and p["time_ms"] >= 0 for p in parts)
    assert whole["cache"] <= whole["processed"] == whole["total"]
    assert whole["time_ms"] >= 0
    assert chunks[len(found) - 1].prompt_progress == whole  # before the first object with choices
    plain = client.chat.completions.create(**asked, extra_body={"return_progress": True})
    assert plain.choices[0].message.content == "Hello!\n"


def test_reasoning_before_a_constraint(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_object"}
    message = ask(client, "think json", response_format=form, max_tokens=200).choices[0].message
    assert message.reasoning_content == "Which?"
    assert message.content.startswith("{")


def test_strict_calls_beside_text(client: openai.OpenAI) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    choice = ask(client, "weather?", tools=strict).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    (call,) = choice.message.tool_calls  # forced text has other tokens than the script, which is lost there
    key = {"get_weather": "city", "get_time": "zone"}[call.function.name]
    assert isinstance(json.loads(call.function.arguments)[key], str)
    assert ask(client, "joke", tools=strict).choices[0].message.content == "A proa walks into a bar."


def test_wrong_tool_choices_are_refused(client: openai.OpenAI) -> None:
    for more, match in (
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly', which is not among the tools"),
        ({"tool_choice": "sometimes"}, "'sometimes'; use none"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            ask(client, "both?", tools=TOOLS, **more)
