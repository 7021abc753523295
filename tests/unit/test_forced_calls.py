"""Grammars of forced calls: they accept a format's calls, and whatever they accept is read as a call."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from answer_texts import WRITERS, Vocabulary, Write, format_of, read
from grammars import EOS, allowed, matcher, random_answer, text_of
from proa.errors import RequestError
from proa.parsers.calls import Tools
from proa.parsers.choose import HARMONY
from proa.parsers.forced import call_grammar, text_or_call
from proa.parsers.formats import CALLS, HARMONY_CALLS, CallFormat
from proa.types import Constraint, Tag

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "boolean"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
FORCED = [*CALLS, HARMONY_CALLS]
GOOD: dict[str, Any] = {"city": "Köln", "unit": "C", "days": 3, "places": [True]}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# The form that is forced, where the format's own is another.
OWN: dict[str, Write] = {
    "llama3_json": lambda n, a: f'{{"name": "{n}", "parameters": {_json(a)}}}',
    "gemma4": lambda n, a: f"<|tool_call>call:{n}{_json(a)}<tool_call|>",
    "pythonic": lambda n, a: f"<|python_start|>[{n}(**{_json(a)})]<|python_end|>",
    "lfm2": lambda n, a: f"<|tool_call_start|>[{n}(**{_json(a)})]<|tool_call_end|>",
    HARMONY: lambda n, a: WRITERS[HARMONY][0](n, a).removesuffix("<|call|>"),
}


def grammar(calls: CallFormat, *names: str) -> Constraint:
    found = call_grammar(calls, TOOLS, names, only_one=True)
    assert found is not None
    return found


def accepts(constraint: Constraint, text: str) -> bool:
    follower = matcher(constraint)
    return EOS in allowed(follower.mask(list(text.encode()), 0)) and not follower.fault


def calls_in(name: str, text: str) -> tuple[tuple[str, str], ...]:
    thinks = HARMONY if name == HARMONY else "none"
    parser = format_of(name, thinks, Vocabulary(())).parser(Tools.of(TOOLS), "", "", 0)
    return read(parser.feed(text) + parser.finish("stop")).calls


@pytest.mark.parametrize("calls", FORCED, ids=[f.name for f in FORCED])
def test_accepted_calls(calls: CallFormat) -> None:
    both = grammar(calls, "get_weather", "now")
    write = OWN.get(calls.name, WRITERS[calls.name][0])
    assert accepts(both, write("get_weather", GOOD))
    assert accepts(both, write("get_weather", {"city": "", "unit": "F"}))
    assert not accepts(both, write("get_weather", {**GOOD, "days": 0}))
    assert not accepts(both, write("get_weather", {**GOOD, "unit": "K"}))
    assert not accepts(both, write("get_weather", {"unit": "C"}))
    assert not accepts(both, write("get_time", {}))
    assert not accepts(both, "Let me see. " + write("get_weather", GOOD))
    assert not accepts(grammar(calls, "now"), write("get_weather", GOOD))


@pytest.mark.parametrize("calls", FORCED, ids=[f.name for f in FORCED])
def test_names_that_are_words_of_the_templates(calls: CallFormat) -> None:
    properties = {"KEY": {"type": "string"}, "VALUE": {"type": "string"}, "STRING": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "ARGUMENTS_of_NAME", "parameters": schema}}]
    found = call_grammar(calls, tools, ["ARGUMENTS_of_NAME"], only_one=True)
    assert found is not None
    write = OWN.get(calls.name, WRITERS[calls.name][0])
    assert accepts(found, write("ARGUMENTS_of_NAME", {"KEY": "a", "VALUE": "b", "STRING": 1}))


IN_JSON = [f for f in FORCED if not f.parameter]  # random text hardly ever ends a parameter of the others


@pytest.mark.parametrize("calls", IN_JSON, ids=[f.name for f in IN_JSON])
@pytest.mark.parametrize("seed", range(2))
def test_random_answers_are_calls(calls: CallFormat, seed: int) -> None:
    tokens = random_answer(matcher(grammar(calls, "get_weather")), random.Random(seed))
    assert tokens is not None
    ((name, arguments),) = calls_in(calls.name, text_of(tokens))
    assert name == "get_weather"
    assert set(json.loads(arguments)) >= {"city", "unit"}


STRICT_TOOLS = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
IN_TEXT = [f for f in FORCED if f.trigger]


@pytest.mark.parametrize("calls", IN_TEXT, ids=[f.name for f in IN_TEXT])
def test_strict_calls_in_free_text(calls: CallFormat) -> None:
    found = call_grammar(calls, STRICT_TOOLS, (), only_one=False)
    assert found is not None
    write = OWN.get(calls.name, WRITERS[calls.name][0])
    text = "Let me see. "
    good, bad = write("get_weather", GOOD), write("get_weather", {**GOOD, "days": 0})
    assert accepts(found, "Just text.")
    assert accepts(found, f"{text}{good} And {text}{good}")
    assert not accepts(found, text + bad)
    assert accepts(found, text + write("now", {"any": 1}))


@pytest.mark.parametrize("calls", FORCED, ids=[f.name for f in FORCED])
def test_text_of_a_form_or_one_call(calls: CallFormat) -> None:
    odd = {"type": "object", "properties": {"any": {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    found = text_or_call(calls, tools, Tag("", Constraint.json({"type": "array", "items": {"type": "integer"}})))
    write = OWN.get(calls.name, WRITERS[calls.name][0])
    call = write("get_weather", GOOD)
    assert accepts(found, "[1, 2]")
    assert accepts(found, call)
    assert accepts(found, write("odd", {"any": [1, 1]})), "without strict, arguments are not held to the schema"
    assert not any(accepts(found, text) for text in ("", "So:", '["a"]', f"[1]{call}", f"{call}{call}"))


def test_a_schema_that_cannot_be_compiled_is_named_with_its_function() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    found = call_grammar(CALLS[0], tools, ["get_weather", "odd"], only_one=True)
    assert found is not None
    with pytest.raises(RequestError, match=r"tools\[odd\]\.parameters\.properties\.a.*uniqueItems") as caught:
        matcher(found)
    assert caught.value.param == "tools[odd].parameters.properties.a.uniqueItems"


@pytest.mark.parametrize("calls", FORCED, ids=[f.name for f in FORCED])
def test_parameters_are_read_as_other_schemas_are(calls: CallFormat) -> None:
    """Formats that are annotations are dropped, and whitespace has a bound, wherever a parameter's schema stands."""
    links = {"type": "array", "items": {"type": "string", "format": "uri-template"}}
    parameters = {"type": "object", "properties": {"links": links}, "required": ["links"]}
    tools = [{"type": "function", "function": {"name": "open", "parameters": parameters}}]
    found = call_grammar(calls, tools, ["open"], only_one=True)
    assert found is not None
    text = OWN.get(calls.name, WRITERS[calls.name][0])("open", {"links": ["a", "b"]})
    assert accepts(found, text)
    assert not accepts(found, text.replace('["a"', '[\n\n\n"a"'))


IN_ELEMENTS = [f for f in FORCED if f.parameter]


COLOUR: dict[str, Any] = {"$ref": "#/$defs/Colour"}
FEW_TEXTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "definition": (COLOUR, ["red", "blue"], ["green", None]),
    "one definition": ({"allOf": [COLOUR], "description": "A colour."}, ["blue"], ["green"]),
    "const": ({"const": "red"}, ["red"], ["blue"]),
    "or null": ({"anyOf": [COLOUR, {"type": "null"}], "default": None}, ["red", None], ["green", 5]),
    "or a number": ({"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, ["auto", 5], ["green", True]),
    "types": ({"type": ["string", "integer"], "enum": ["red", 5]}, ["red", 5], ["blue", 6]),
    "names itself": ({"$ref": "#/$defs/Loop"}, ["red", None], ["blue", 5]),
    "empty enum": ({"type": "string", "enum": []}, ["red"], []),
}


@pytest.mark.parametrize("name", FEW_TEXTS)
@pytest.mark.parametrize("calls", IN_ELEMENTS, ids=[f.name for f in IN_ELEMENTS])
def test_texts_that_a_schema_lists(calls: CallFormat, name: str) -> None:
    own, good, bad = FEW_TEXTS[name]
    loop = {"anyOf": [*[{"$ref": "#/$defs/Loop"}] * 100, {"const": "red"}, {"type": "null"}]}
    defs = {"Colour": {"enum": ["red", "blue"]}, "Loop": loop}
    parameters = {"properties": {"colour": own}, "required": ["colour"], "$defs": defs}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": parameters}}]
    found = call_grammar(calls, tools, ["paint"], only_one=True)
    assert found is not None
    texts = {str(value): WRITERS[calls.name][0]("paint", {"colour": value}) for value in [*good, *bad]}
    assert [value for value in good if not accepts(found, texts[str(value)])] == []
    assert [value for value in bad if accepts(found, texts[str(value)])] == []
    for value in good:
        parser = format_of(calls.name, "none", Vocabulary(())).parser(Tools.of(tools), "", "", 0)
        ((_, arguments),) = read(parser.feed(texts[str(value)]) + parser.finish("stop")).calls
        assert json.loads(arguments) == {"colour": value}


UUID = "123e4567-e89b-12d3-a456-426614174000"
SHORT = {"type": "string", "minLength": 2, "maxLength": 4}
LIMITED_TEXTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "length": (SHORT, ["ab", "köln", "a\nb", "</p>"], ["", "a", "abcde"]),
    "least length": ({"type": "string", "minLength": 2}, ["ab", "null", "</param" * 9], ["a"]),
    "most length": ({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
    "found": ({"type": "string", "pattern": r"\d/[x/]"}, ["1/x", "so 3// it"], ["/x", "1/y"]),
    "whole": ({"type": "string", "pattern": "^[a-z|$]+$"}, ["ab", "|$"], ["aB", "a b", ""]),
    "several": (
        {"type": "string", "pattern": r"^a|b$|c\$|(?:d)\\$"},
        ["ax", "xb", "xc$x", "xd\\"],
        ["xa", "bx", "xc"],
    ),
    "both": ({"type": "string", "pattern": "^[ab]", "maxLength": 2}, ["b", "ax"], ["x", "abc"]),
    "format": ({"type": "string", "format": "uuid"}, [UUID], [UUID[1:], "", f"{UUID} "]),
    "format and length": ({"type": "string", "format": "hostname", "maxLength": 3}, ["a.b"], ["a.bc", "a_b"]),
    "other format": ({"type": "string", "format": "colour"}, ["red", ""], []),
    "or null": ({"anyOf": [SHORT, {"type": "null"}]}, ["ab", None], ["a", "abcde"]),
    "types": ({**SHORT, "type": ["string", "null"]}, ["ab", None], ["a", "abcde"]),
    "or one text": ({"anyOf": [SHORT, {"const": "longer"}]}, ["ab", "longer"], ["longe", "a"]),
    "definition": ({"$ref": "#/$defs/Short"}, ["ab"], ["a"]),
}


@pytest.mark.parametrize("name", LIMITED_TEXTS)
@pytest.mark.parametrize("calls", IN_ELEMENTS, ids=[f.name for f in IN_ELEMENTS])
def test_lengths_and_patterns_of_texts(calls: CallFormat, name: str) -> None:
    own, good, bad = LIMITED_TEXTS[name]
    properties = {"text": own, "more": {"type": "integer"}}
    parameters = {"properties": properties, "required": [*properties], "$defs": {"Short": SHORT}}
    found = call_grammar(calls, [{"function": {"name": "f", "parameters": parameters}}], ["f"], only_one=True)
    assert found is not None
    texts = {str(value): WRITERS[calls.name][0]("f", {"text": value, "more": 5}) for value in [*good, *bad]}
    assert [value for value in good if not accepts(found, texts[str(value)])] == []
    assert [value for value in bad if accepts(found, texts[str(value)])] == []


@pytest.mark.parametrize("calls", IN_ELEMENTS, ids=[f.name for f in IN_ELEMENTS])
@pytest.mark.parametrize(
    "wrong",
    [
        {"minLength": "2"},
        {"maxLength": -1},
        {"maxLength": True},
        {"pattern": 5},
        {"pattern": "a(?=b)"},
        {"pattern": "(^a)"},
    ],
)
def test_lengths_and_patterns_that_cannot_be_used(calls: CallFormat, wrong: dict[str, Any]) -> None:
    parameters = {"properties": {"text": {"type": "string", **wrong}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(RequestError, match=r"^tools\[f\]\.parameters") as caught:
        matcher(call_grammar(calls, tools, ["f"], only_one=True) or Constraint.choice(["none"]))
    assert (caught.value.param or "").startswith("tools[f].parameters")


@pytest.mark.parametrize("calls", IN_ELEMENTS, ids=[f.name for f in IN_ELEMENTS])
@pytest.mark.parametrize(
    ("parameters", "place"),
    [(True, ""), ("x", ""), ([1], ""), ({"properties": {"a": {"type": "string", "enum": 5}}}, ".properties.a.enum")],
)
def test_parameters_of_wrong_types(calls: CallFormat, parameters: Any, place: str) -> None:
    tools = [{"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    with pytest.raises(RequestError) as caught:
        call_grammar(calls, tools, ["odd"], only_one=True)
    assert caught.value.param == f"tools[odd].parameters{place}"


def test_formats_without_a_grammar() -> None:
    assert call_grammar(None, TOOLS, ["now"], only_one=True) is None
    assert {f.name for f in FORCED if not f.written} == set()
    assert {f.name for f in FORCED} - {f.name for f in IN_TEXT} == {"llama3_json", HARMONY}
