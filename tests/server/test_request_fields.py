"""Every field of OpenAI's and Anthropic's requests is implemented, refused or ignored, as docs/api.md says."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from http_calls import CHAT, COMPLETIONS, USER, post

from fakes import FakeEngine, Reply
from proa.server.anthropic_schema import CountTokensRequest, MessagesRequest
from proa.server.fields import IGNORED, REFUSED, Endpoint, implemented_fields
from proa.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from proa.text.tokenizer import Tokenizer
from proa.types import SamplingParams

messages = pytest.importorskip("anthropic.types")
completion = pytest.importorskip("openai.types.completion_create_params")
chat = pytest.importorskip("openai.types.chat.completion_create_params")

ANTHROPICS_HEADERS = {"user_profile_id", "workspace_id"}  # the client sends them as such
DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def refused_on(endpoint: Endpoint) -> set[str]:
    return {row.name for row in REFUSED if row.is_for(endpoint)}


@pytest.mark.parametrize(
    ("endpoint", "schema", "theirs"),
    [
        ("chat", ChatRequest, chat.CompletionCreateParamsStreaming),
        ("completions", CompletionRequest, completion.CompletionCreateParamsStreaming),
    ],
)
def test_every_openai_field_is_known(endpoint: Endpoint, schema: typing.Any, theirs: typing.Any) -> None:
    known = set(schema.model_fields) | refused_on(endpoint) | {row.name for row in IGNORED}
    assert set(typing.get_type_hints(theirs)) - known == set()


@pytest.mark.parametrize(
    ("schema", "theirs"),
    [
        (MessagesRequest, messages.message_create_params.MessageCreateParamsStreaming),
        (CountTokensRequest, messages.message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_anthropic_field_is_known(schema: typing.Any, theirs: typing.Any) -> None:
    known = set(schema.model_fields) | refused_on("messages") | {row.name for row in IGNORED} | ANTHROPICS_HEADERS
    assert set(typing.get_type_hints(theirs)) - known == set()


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_messages_ignore_no_field_of_the_others(schema: typing.Any) -> None:
    known = set(MessagesRequest.model_fields) | refused_on("messages")
    assert set(schema.model_fields) - known - {"prompt"} == set()


@pytest.mark.parametrize(
    ("endpoint", "schema"),
    [("chat", ChatRequest), ("completions", CompletionRequest), ("messages", MessagesRequest)],
)
def test_no_field_is_in_two_tables(endpoint: Endpoint, schema: typing.Any) -> None:
    implemented, ignored = set(schema.model_fields), {row.name for row in IGNORED}
    assert not implemented & refused_on(endpoint)
    assert not implemented & ignored
    assert not refused_on(endpoint) & ignored
    assert len(REFUSED) == len({row.name for row in REFUSED})


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_every_sampling_parameter_can_be_asked(schema: typing.Any) -> None:
    asked_otherwise = {"constraint", "thinking", "return_progress"}  # server/constraints.py, prompts.py, chat.py
    assert set(SamplingParams.__struct_fields__) - asked_otherwise <= set(schema.model_fields)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": USER, "max_tokens": 100_000}, "max_tokens"),
        (CHAT, {"messages": USER, "max_completion_tokens": 100_000, "stream": True}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 100_000}, "max_tokens"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 100_000}, "max_output_tokens"),
        ("/v1/messages", {"messages": USER, "max_tokens": 100_000}, "max_tokens"),
        ("/api/chat", {"messages": USER, "options": {"num_predict": 100_000}}, "options.num_predict"),
        ("/api/generate", {"prompt": "Hi", "options": {"num_predict": 100_000}}, "options.num_predict"),
    ],
)
def test_limits_beyond_the_context_are_cut_and_named(
    path: str, body: dict[str, typing.Any], field: str, tokenizer: Tokenizer
) -> None:
    engine = FakeEngine(Reply(tokenizer.encode("Hello")))
    answer = post(tokenizer, path, engine, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-proa-ignored-fields"] == field
    (request,) = engine.requests
    assert len(request.tokens) + request.sampling.max_tokens == 4096


def test_null_means_not_given() -> None:
    fields, unknown, _ = implemented_fields({"n": None, "suffix": None, "x": None}, {"n"}, "chat", strict=False)
    assert fields == {}
    assert unknown == ["x"]


_CALL = {"function": {"name": "f", "arguments": {}}}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": None, "is_error": None}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": None}}),
        ("/api/chat", {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]}),
        ("/api/chat", {"messages": USER, "options": {"stop": None, "presence_penalty": None}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [_RESULT]}], "max_tokens": 1}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}],
                          "tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}),
    ],
)  # fmt: skip
def test_null_in_an_object_means_not_given(tokenizer: Tokenizer, path: str, body: dict[str, typing.Any]) -> None:
    assert post(tokenizer, path, json=body).status_code == 200


def test_docs_name_every_field() -> None:
    named = set(re.findall(r"`([a-z_]+)`", DOCS.read_text(encoding="utf-8")))
    schemas = (ChatRequest, CompletionRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest)
    fields = {name for schema in schemas for name in schema.model_fields}
    fields |= {row.name for row in REFUSED} | {row.name for row in IGNORED}
    assert fields - named == set()
