"""Grammars of forced calls: they accept a format's calls, and whatever they accept is read as a call."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from answer_texts import WRITERS, Vocabulary, format_of, read
from grammars import EOS, allowed, matcher, random_answer, text_of
from proa.parsers.calls import Tools
from proa.parsers.forced import forced_call_grammar
from proa.parsers.formats import CALLS, CallFormat
from proa.types import Constraint

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
FORCED = [f for f in CALLS if f.written]
GOOD: dict[str, Any] = {"city": "Köln", "unit": "C", "days": 3, "places": [True]}


def grammar(calls: CallFormat, *names: str) -> Constraint:
    found = forced_call_grammar(calls, TOOLS, names, only_one=True)
    assert found is not None
    return found


def accepts(constraint: Constraint, text: str) -> bool:
    follower = matcher(constraint)
    return EOS in allowed(follower.mask(list(text.encode()), 0)) and not follower.fault


def calls_in(name: str, text: str) -> tuple[tuple[str, str], ...]:
    parser = format_of(name, "none", Vocabulary(())).parser(Tools.of(TOOLS), "", "", 0)
    return read(parser.feed(text) + parser.finish("stop")).calls


@pytest.mark.parametrize("calls", FORCED, ids=[f.name for f in FORCED])
def test_accepted_calls(calls: CallFormat) -> None:
    both = grammar(calls, "get_weather", "now")
    is_own = {  # the form that is forced, of several that are read
        "llama3_json": lambda n, a: f'{{"name": "{n}", "parameters": {json.dumps(a, ensure_ascii=False)}}}',
    }
    write = is_own.get(calls.name, WRITERS[calls.name][0])
    assert accepts(both, write("get_weather", GOOD))
    assert accepts(both, write("get_weather", {"city": "", "unit": "F"}))
    assert not accepts(both, write("get_weather", {**GOOD, "days": 0}))
    assert not accepts(both, write("get_weather", {**GOOD, "unit": "K"}))
    assert not accepts(both, write("get_weather", {"unit": "C"}))
    assert not accepts(both, write("get_time", {}))
    assert not accepts(both, "Let me see. " + write("get_weather", GOOD))
    assert not accepts(grammar(calls, "now"), write("get_weather", GOOD))


IN_JSON = [f for f in FORCED if not f.parameter]  # random text hardly ever ends a parameter of the others


@pytest.mark.parametrize("calls", IN_JSON, ids=[f.name for f in IN_JSON])
@pytest.mark.parametrize("seed", range(2))
def test_random_answers_are_calls(calls: CallFormat, seed: int) -> None:
    tokens = random_answer(matcher(grammar(calls, "get_weather")), random.Random(seed))
    assert tokens is not None
    ((name, arguments),) = calls_in(calls.name, text_of(tokens))
    assert name == "get_weather"
    assert set(json.loads(arguments)) >= {"city", "unit"}


def test_formats_without_a_grammar() -> None:
    assert forced_call_grammar(None, TOOLS, ["now"], only_one=True) is None
    unforced = {f.name for f in CALLS} - {f.name for f in FORCED}
    assert unforced == {"gemma4", "pythonic", "lfm2"}
