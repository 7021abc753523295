"""Delimiters that are tokens: their text in chunks, its offsets, stop strings around it; values typed by schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from proa.parsers.typed import typed
from proa.text.choice import ChoiceStream
from proa.text.detokenize import Detokenizer
from proa.types import Chunk, EngineRequest, Sampling, SamplingParams, TokenEvent

TOKENS = {
    1: b"He",
    2: b"llo",
    3: b"<call>",
    4: b"</call>",
    5: b"\xf0\x9f",
    6: b"\xa6\x8a",
    7: b"<eos>",
    8: b"<",
    9: b"call>",
}
MARKERS = {3: "<call>", 4: "</call>"}


def chunks(tokens: Sequence[int], *, stop: tuple[str, ...] = (), hidden: Sequence[int] = (3, 7)) -> list[Chunk]:
    """Feed tokens one by one. <call> and <eos> are special; <eos> is skipped, <call> is kept."""
    request = EngineRequest(id="a", tokens=[0], sampling=Sampling(max_tokens=99))
    stream = ChoiceStream(
        0, request, SamplingParams(stop=stop), Detokenizer(TOKENS.__getitem__, {7}), markers=MARKERS, hidden=hidden
    )
    made = []
    for i, token in enumerate(tokens):
        finish = "length" if i == len(tokens) - 1 else None
        chunk = stream.feed(TokenEvent(id="a", tokens=[token], finish=finish))
        made += [chunk] if chunk is not None else []
        if stream.finished:
            break
    return made


def marked(made: Sequence[Chunk]) -> tuple[str, list[int]]:
    """Return the whole text, and the positions of markers in it."""
    text, marks = "", []
    for chunk in made:
        assert all(0 <= mark < len(chunk.text) for mark in chunk.markers)
        marks += [len(text) + mark for mark in chunk.markers]
        text += chunk.text
    return text, marks


def test_markers_are_kept_with_their_offsets() -> None:
    assert marked(chunks([1, 2, 3, 1, 7, 4])) == ("Hello<call>He</call>", [5, 13])
    assert marked(chunks([8, 9, 3])) == ("<call><call>", [6])  # the first is ordinary text


def test_an_incomplete_character_before_a_marker() -> None:
    assert marked(chunks([5, 6, 3, 5, 3])) == ("🦊<call>\ufffd<call>", [1, 8])


@pytest.mark.parametrize(
    ("stop", "text", "ends"),
    [
        (("call",), "Hello<call>He</", True),  # not in the hidden <call>, but in the visible </call>
        (("o<call>",), "Hello<call>He</call>", False),
        (("oHe",), "Hello<call>He</call>", False),  # no stop string reaches over a hidden marker
        (("llo",), "He", True),
        (("e</",), "Hello<call>H", True),
    ],
)
def test_stop_strings_match_visible_text(stop: tuple[str, ...], text: str, ends: bool) -> None:
    made = chunks([1, 2, 3, 1, 4], stop=stop)
    assert marked(made)[0] == text
    assert (made[-1].finish, made[-1].stop_reason) == (("stop", stop[0]) if ends else ("length", None))
    assert marked(made)[1] == [mark for mark in (5, 13) if mark < len(text)]


ROOT = {"$defs": {"Size": {"enum": ["s", "m", 3]}, "Loop": {"$ref": "#/$defs/Loop"}}}
ANY: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("007", {"type": "string"}, "007"),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": "string"}, "null"),
        (" 7 ", {"type": "integer"}, 7),
        ("7.0", {"type": "integer"}, 7),
        ("7.5", {"type": "integer"}, "7.5"),  # does not fit: the tool says what is wrong
        ("many", {"type": "integer"}, "many"),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("-0.5", {"type": "number"}, -0.5),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["integer", "null"]}, None),
        ("123", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "123"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("[1, {\"a\": null}]", {"type": "array"}, [1, {"a": None}]),
        ("{'a': True}", {"type": "object"}, {"a": True}),  # a Python literal
        ("[1", {"type": "array"}, "[1"),
        ("[1]", {"type": "object"}, "[1]"),
        ('{"a": 1}', {"properties": {"a": {}}}, {"a": 1}),
        ("3", {"$ref": "#/$defs/Size"}, 3),
        ("m", {"$ref": "#/$defs/Size"}, "m"),
        ("x", {"$ref": "#/$defs/Loop"}, "x"),
        ("3", {"$ref": "#/$defs/Missing"}, 3),
        ("3", {"oneOf": [{"const": 3}, {"const": "a"}]}, 3),
        ("3", ANY, 3),
        ("three", ANY, "three"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 9000, {"type": "array"}, "[" * 9000),
    ],
)  # fmt: skip
def test_values_get_the_schemas_type(text: str, schema: dict[str, Any], value: Any) -> None:
    got = typed(text, schema, ROOT)
    assert (got, type(got)) == (value, type(value))
    json.dumps(got, allow_nan=False)


def test_a_union_that_names_itself_many_times_is_read_once() -> None:
    """Reading it once for each path would take until the server is restarted."""
    root = {"$defs": {"A": {"anyOf": [*[{"$ref": "#/$defs/A"}] * 100, {"type": "integer"}]}}}
    assert typed("3", {"$ref": "#/$defs/A"}, root) == 3


def test_values_without_a_schema() -> None:
    assert typed("3", None, {}) == "3"
    assert typed("3", None, {}, unknown="any") == 3
