"""Request fields that constrain an answer: what each becomes, and refusals over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fakes import Reply
from proa.errors import RequestError
from proa.server.constraints import constraint_of
from proa.text.tokenizer import Tokenizer
from proa.types import Constraint, Tag, Tags
from served import MODEL, Served

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
OBJECT = {"type": "object"}
TAG = Tag("<f=x>", Constraint.json(SCHEMA, param="?"), "</f>")
NEW_TAG = {"type": "tag", "begin": "<f=x>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
LEGACY = {"structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}

READ: dict[str, tuple[dict[str, Any], Constraint | None]] = {
    "nothing": ({}, None),
    "text": ({"response_format": {"type": "text"}}, None),
    "empty grammar": ({"grammar": "", "structured_outputs": {"json_object": False}}, None),
    "json object": ({"response_format": {"type": "json_object"}}, Constraint.json(OBJECT, param="response_format")),
    "openai": ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
               Constraint.json(SCHEMA, param="response_format.json_schema.schema")),
    "llama.cpp": ({"response_format": {"type": "json_object", "schema": SCHEMA}},
                  Constraint.json(SCHEMA, param="response_format.schema")),
    "vllm json": ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "regex": None}},
                  Constraint.json(SCHEMA, param="structured_outputs.json", whitespace=" ?")),
    "vllm text": ({"structured_outputs": {"json": TEXT}}, Constraint.json(TEXT, param="structured_outputs.json")),
    "vllm object": ({"structured_outputs": {"json_object": True}},
                    Constraint.json(OBJECT, param="structured_outputs.json_object")),
    "vllm regex": ({"structured_outputs": {"regex": "a+"}}, Constraint.regex("a+", param="structured_outputs.regex")),
    "vllm choice": ({"structured_outputs": {"choice": ["a", "é"]}},
                    Constraint.choice(["a", "é"], param="structured_outputs.choice")),
    "vllm grammar": ({"structured_outputs": {"grammar": "start: A"}},
                     Constraint.grammar("start: A", param="structured_outputs.grammar")),
    "guided_json": ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
                    Constraint.json(SCHEMA, param="guided_json", whitespace="")),
    "guided_regex": ({"guided_regex": "a+"}, Constraint.regex("a+", param="guided_regex")),
    "guided_choice": ({"guided_choice": ["a"]}, Constraint.choice(["a"], param="guided_choice")),
    "guided_grammar": ({"guided_grammar": "g"}, Constraint.grammar("g", param="guided_grammar")),
    "sglang regex": ({"regex": "a"}, Constraint.regex("a", param="regex")),
    "sglang ebnf": ({"ebnf": "g"}, Constraint.grammar("g", param="ebnf")),
    "sglang schema": ({"json_schema": TEXT}, Constraint.json(TEXT, param="json_schema")),
    "gbnf": ({"grammar": "g"}, Constraint.grammar("g", param="grammar")),
    "llama.cpp schema": ({"json_schema": SCHEMA}, Constraint.json(SCHEMA, param="json_schema")),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_fields_become_one_constraint(name: str) -> None:
    fields, want = READ[name]
    assert constraint_of(fields) == want


def tags_of(fields: dict[str, Any]) -> dict[str, Any]:
    found = constraint_of(fields)
    assert found is not None
    assert found.kind == "tags"
    tags: dict[str, Any] = json.loads(found.text)
    return {**tags, "tags": [[tag["begin"], json.loads(tag["content"]["text"]), tag["end"]] for tag in tags["tags"]]}


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"structural_tag": LEGACY}, {"triggers": ["<f="], "at_least": 0}),
        ({"structural_tag": json.dumps(LEGACY)}, {"triggers": ["<f="], "at_least": 0}),
        ({"structured_outputs": {"structural_tag": LEGACY}}, {"triggers": ["<f="], "at_least": 0}),
        ({"response_format": {"type": "structural_tag", **LEGACY}}, {"triggers": ["<f="], "at_least": 0}),
        ({"response_format": {"type": "structural_tag", "format": NEW_TAG}}, {"at_most": 1}),
        ({"structural_tag": {"format": {"type": "triggered_tags", "tags": [NEW_TAG], "triggers": ["<f="],
                                        "at_least_one": True, "stop_after_first": True}}},
         {"triggers": ["<f="], "at_most": 1}),
        ({"structural_tag": {"format": {"type": "tags_with_separator", "tags": [NEW_TAG], "separator": ";"}}},
         {"separator": ";", "at_least": 0}),
    ],
)  # fmt: skip
def test_structural_tags(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    plain = {"triggers": [], "separator": "", "at_least": 1, "at_most": None}
    assert tags_of(fields) == {"tags": [["<f=x>", SCHEMA, "</f>"]], **plain, **changes}
    assert Tags(tags=(TAG,)).at_least == 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two": ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    "two inside": ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
    "type": ({"response_format": {"type": "yaml"}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
    "schema a number": ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    "unknown key": ({"structured_outputs": {"yaml": 3}}, "structured_outputs.yaml"),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "regex a list": ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
    "whitespace alone": ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    "tag": ({"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<"]}}, "structural_tag.structures[0]"),
    "triggers": ({"structural_tag": {**LEGACY, "triggers": []}}, "structural_tag.triggers"),
    "no tags": ({"structural_tag": "{"}, "structural_tag"),
    "surrogate": ({"structural_tag": '{"format": {"type": "regex", "pattern": "\\ud800"}}'}, "structural_tag"),
    "format": ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag.format"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields_are_refused_by_name(name: str) -> None:
    fields, param = WRONG[name]
    with pytest.raises(RequestError) as refused:
        constraint_of(fields)
    assert refused.value.param == param
    assert refused.value.remedy


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_over_http(path: str, stream: bool, tokenizer: Tokenizer) -> None:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = {"model": MODEL, "stream": stream, **prompt}
    with Served(tokenizer, Reply(tokenizer.encode("{}"))) as served:
        asked = {**body, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
        answer = httpx.post(served.url + path, json=asked, timeout=30)
        assert answer.status_code == 200
        constraint = served.engine.requests[-1].sampling.constraint
        assert constraint == Constraint.json(SCHEMA, param="response_format.json_schema.schema")
        known = served.engine.vocabulary
        assert known is not None
        assert b"".join(known.tokens[token] for token in tokenizer.encode("hello wörld")) == "hello wörld".encode()
        bad = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
        wrong = {**body, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": bad}}}
        refused = httpx.post(served.url + path, json=wrong, timeout=30)
        assert refused.status_code == 400, "also of a stream"
        error = refused.json()["error"]
        assert error["param"] == "response_format.json_schema.schema.properties.x.pattern"
        assert "look-around" in error["message"]
