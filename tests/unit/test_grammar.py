"""Constraints: what is translated, compiled, allowed token by token, and refused by name."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from examples import examples
from grammars import EOS, MARK, allowed, lexicon, matcher, random_answer, text_of, vocabulary
from proa.errors import RequestError
from proa.grammar.checker import GrammarChecker
from proa.grammar.compile import compiled
from proa.grammar.store import GrammarStore
from proa.grammar.trial import verdict
from proa.types import Constraint, Sampling, SamplingParams, Tag, Tags, Thinking

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = Tag('<call>{"args": ', Constraint.json(PERSON), "}</call>")


def union(*required: str, **more: Any) -> Constraint:
    """One of two definitions, told apart by the property `kind`, as pydantic writes it."""
    pets = {
        kind: {"type": "object", "required": list(required),
               "properties": {"kind": {"const": kind, "type": "string"}, "age": {"type": "integer"}}}
        for kind in ("cat", "dog")
    }  # fmt: skip
    branches = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    return Constraint.json({"oneOf": branches, "$defs": pets, **more})


def spelt(text: str) -> list[int]:
    return list(text.encode())


def accepts(constraint: Constraint, tokens: list[int]) -> bool:
    """Whether the tokens may follow each other, and the end may follow the last one."""
    follower = matcher(constraint)
    return EOS in allowed(follower.mask(tokens, 0)) and not follower.fault


ACCEPTED: dict[str, tuple[Constraint, list[str], list[str]]] = {
    "json": (Constraint.json(PERSON), ['{"name": "Ed","age":7}', '{\n  "name": "é",\n  "age": 0\n}'],
             ['{"name":"Ed"}', '{"name":"Eduard","age":7}', '{   "name":"Ed","age":7}', "[]"]),
    "compact": (Constraint.json(PERSON, whitespace=""), ['{"name":"Ed","age":7}'], ['{"name": "Ed","age":7}']),
    "union": (union("kind"), ['{"kind":"cat","age":1}', '{"kind":"dog"}'], ['{"kind":"cow"}', '{"age":1}']),
    "union with discriminator": (union(discriminator={"propertyName": "kind"}),
                                 ['{"kind":"dog","age":1}'], ['{"age":1}', "{}"]),
    "union with a slash in a name": (Constraint.json({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}],
                                                      "$defs": {"a/b": {"type": "integer"}}}), ["null", "7"], ['"x"']),
    "nullable": (Constraint.json({"oneOf": [{"type": "null"}, {"$ref": "#/definitions/a"}],
                                  "definitions": {"a": {"type": "array", "uniqueItems": False}}}),
                 ["null", "[1]"], ["1"]),
    "names of definitions": (Constraint.json(
        {"anyOf": [{"$ref": f"#/definitions/{name}"} for name in ("Map<string,日本>", "List[int]", "a%20b", "c d")],
         "definitions": {name: {"const": name} for name in ("Map<string,日本>", "List[int]", "a b", "c d")}}),
        ['"Map<string,日本>"', '"List[int]"', '"a b"', '"c d"'], ['"x"']),
    "record": (Constraint.json({"type": "object", "propertyNames": {"type": "string"},
                                "additionalProperties": {"type": "integer"}}), ["{}", '{"é":1}'], ['{"a":"b"}']),
    "true": (Constraint.json(True), ["[1, {}]", '"a"'], ["a"]),
    "text": (Constraint.json('{"const": "a"}'), ['"a"'], ['"b"']),
    "regex": (Constraint.regex(r"[a-c]{2}/\d\n?"), ["ab/5", "ab/5\n"], ["ab5", "abc/5", "xab/5"]),
    "choice": (Constraint.choice(["yes", 'a "b"\n', "日本"]), ["yes", 'a "b"\n', "日本"], ["ye", "no", "yesyes"]),
    "lark": (Constraint.grammar('start: "a" B+\nB: /[0-9]/'), ["a12"], ["a", "b1"]),
    "lark, inlined": (Constraint.grammar('  ?start: sum\n  ?sum: N | sum "+" N\n  N: /[0-9]/'), ["1", "1+2"], ["1+"]),
    "gbnf": (Constraint.grammar('root ::= "a" other | "c"\nother ::= [0-9]+'), ["a12", "c"], ["a"]),
    "one tag": (Constraint.tags(Tags(tags=(CALL,), at_most=1)), ['<call>{"args": {"name":"","age":1}}</call>'],
                ["", 'x<call>{"args": {"name":"","age":1}}</call>', '<call>{"args": {}}</call>']),
    "two tags": (Constraint.tags(Tags(tags=(Tag("<", Constraint.regex("[a-z]"), ">"),), separator=";", at_least=2)),
                 ["<a>;<b>", "<a>;<b>;<c>"], ["<a>", "<a><b>"]),
    "free text": (Constraint.tags(Tags(tags=(Tag("<f=a>", Constraint.regex("[0-9]"), "</f>"),
                                             Tag("<f=b>", Constraint.json({"type": "null"}), "</f>")),
                                       triggers=("<f=",), at_least=0)),
                  ["hello < there", "a <f=a>1</f> b <f=b>null</f>", ""], ["<f=c>1</f>", "a <f=a>x</f>"]),
    "free text, forced": (Constraint.tags(Tags(tags=(Tag("<f>", Constraint.choice(["x"]), "."),), triggers=("<f>",))),
                          ["think <f>x. bye"], ["think", "<f>x"]),
    "ends with its tag": (Constraint.tags(Tags(tags=(Tag("<f>", Constraint.choice(["x"]), "."),), triggers=("<f>",),
                                               at_least=0, at_most=1)), ["a", "a <f>x."], ["a <f>x. b"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_and_rejected_texts(name: str) -> None:
    constraint, good, bad = ACCEPTED[name]
    assert [text for text in good if not accepts(constraint, spelt(text))] == []
    assert [text for text in bad if accepts(constraint, spelt(text))] == []


def test_special_tokens_are_text_only_where_a_tag_spells_them() -> None:
    tagged = Constraint.tags(Tags(tags=(Tag("<mark>a", Constraint.choice(["x"]), "<mark>"),), at_most=1))
    assert accepts(tagged, [MARK, *spelt("ax"), MARK])
    assert not accepts(tagged, spelt("<mark>ax<mark>"))
    free = Constraint.tags(Tags(tags=(Tag("<mark>a", Constraint.choice(["x"]), ""),), triggers=("<mark>",), at_least=0))
    assert accepts(free, [*spelt("so "), MARK, *spelt("ax")])
    everything = allowed(matcher(Constraint.regex(r"(.|\n)*")).mask([], 0))
    assert MARK not in everything
    assert EOS in everything
    assert [token for token in everything if not lexicon().tokens[token]] == [], "ids without a token"


def refusal(constraint: Constraint) -> RequestError:
    with pytest.raises(RequestError) as refused:
        compiled(constraint, LLTokenizer("byte"), {})
    return refused.value


REFUSED: dict[str, tuple[Constraint, str, str]] = {
    "look-ahead": (Constraint.json({"properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}, param="rf"),
                   "rf.properties.x.pattern", "look-ahead"),
    "keyword": (Constraint.json({"items": {"anyOf": [{}, {"type": "array", "uniqueItems": True}]}}, param="rf"),
                "rf.items.anyOf.1.uniqueItems", "uniqueItems is not supported"),
    "definition": (Constraint.json({"properties": {"x": {"$ref": "#/$defs/k"}}, "$defs": {"k": {"not": {}}}},
                                   param="rf"), "rf.$defs.k.not", "not is not supported"),
    "no definitions": (Constraint.json({"$ref": "#/$defs/x", "$defs": 5}), "constraint.$ref", "x"),
    "other file": (Constraint.json({"items": {"$ref": "http://x/y"}}), "constraint.items.$ref", "http://x/y"),
    "type": (Constraint.json({"type": "animal"}), "constraint.type", "animal"),
    "impossible": (Constraint.json({"type": "string", "minLength": 3, "maxLength": 1}), "constraint.minLength",
                   "minLength"),
    "overlapping oneOf": (Constraint.json({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
                          "constraint.oneOf", "oneOf"),
    "overlapping definitions": (union(), "constraint.oneOf", "tells its schemas apart"),
    "never": (Constraint.json(False), "constraint", "not"),
    "own options": (Constraint.json({"x-guidance": {"lenient": True}, "not": {}}), "constraint.not", "not"),
    "no JSON": (Constraint.json("{nope"), "constraint", "not JSON"),
    "no schema": (Constraint.json("[1]"), "constraint", "neither an object nor a boolean"),
    "NaN": (Constraint.json('{"const": NaN}'), "constraint", "NaN"),
    "nested": (Constraint.json('{"items":' * 5000 + "{}" + "}" * 5000), "constraint", "nested"),
    "regex": (Constraint.regex("(a", param="regex"), "regex", "unclosed group"),
    "no options": (Constraint.choice([]), "constraint", "one or more"),
    "lark": (Constraint.grammar('start: ("a"'), "constraint", "Expected"),
    "gbnf": (Constraint.grammar('root ::= ("a"'), "constraint", "GBNF"),
    "gbnf, start": (Constraint.grammar('root ::= start\nstart ::= "a"'), "constraint", "'start' already exists"),
    "missing rule": (Constraint.grammar("root ::= other"), "constraint", "other"),
    "no tags": (Constraint.tags(Tags(tags=())), "constraint", "0 tags"),
    "no trigger": (Constraint.tags(Tags(tags=(CALL,), triggers=("[",))), "constraint", "triggers"),
    "too long": (Constraint.regex("a" * (1 << 20) + "b"), "constraint", "1048577 bytes"),
    "counts": (Constraint.tags(Tags(tags=(CALL,), at_least=3, at_most=2)), "constraint", "at_least"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_construct_and_its_path(name: str) -> None:
    constraint, param, message = REFUSED[name]
    error = refusal(constraint)
    assert error.param == param
    assert message in str(error)
    assert error.remedy


def test_unknown_formats_are_annotations() -> None:
    named_so = {"type": "object", "properties": {"format": {"type": "string", "format": "int-99"}}}
    assert accepts(Constraint.json(named_so), spelt('{"format":"x"}'))
    assert not accepts(Constraint.json({"type": "string", "format": "date"}), spelt('"x"'))


def test_stop_tokens_come_only_at_the_end_and_are_forced_there() -> None:
    yes = Constraint.regex("ab?")
    follower = matcher(yes, stops=(EOS, ord("z")))
    assert allowed(follower.mask([], 0)) == [ord("a")]
    assert allowed(follower.mask(spelt("a"), 0)) == [ord("b"), ord("z"), EOS]
    assert allowed(follower.mask(spelt("ab"), 0)) == [ord("z"), EOS]
    later = matcher(yes, min_tokens=5)
    assert allowed(later.mask([9, *spelt("a")], 1)) == [ord("b")], "min_tokens forbids the end while text may follow"
    assert allowed(later.mask([9, *spelt("ab")], 1)) == [EOS], "and yields where nothing else is possible"
    stuck = matcher(yes, stops=(EOS, ord("a")))
    assert allowed(stuck.mask([], 0)) == [ord("a"), EOS]
    assert "leave no token" in stuck.fault


def test_masks_depend_on_the_generated_tokens_alone() -> None:
    answer, prompt = spelt('{"name": "Ed", "age": 3}'), [5, 6, 7]
    kept = matcher(Constraint.json(PERSON))
    for length in range(len(answer) + 1):
        mask = allowed(kept.mask([*prompt, *answer[:length]], 3))
        assert mask == allowed(kept.mask([*prompt, *answer[:length]], 3))
        fresh = matcher(Constraint.json(PERSON))
        assert mask == allowed(fresh.mask([*prompt, *answer[:length]], 3))


SCHEMAS = st.recursive(
    st.sampled_from(
        [{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "string"}, {"enum": [1, "é", None]},
         {"type": "number", "minimum": -2, "exclusiveMaximum": 7}, {"type": "string", "pattern": "^a[b-d]+$"},
         {"const": {"a": [1.5]}}, {"type": "string", "format": "date"},
         {"type": "string", "minLength": 2, "maxLength": 3}]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least, "maxItems": least + 2},
                  inner, st.integers(0, 2)),
        st.builds(lambda members, some: {"type": "object", "properties": members, "required": sorted(members)[:some],
                                         "additionalProperties": False},
                  st.dictionaries(st.sampled_from(["a", 'b"', "ç"]), inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(deadline=None, max_examples=examples(60))
@given(SCHEMAS, st.integers(0, 2**31))
def test_random_answers_fulfil_random_schemas(schema: dict[str, Any], seed: int) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    answer = random_answer(matcher(Constraint.json(schema)), random.Random(seed))
    if answer is not None:
        validator.validate(json.loads(text_of(answer)))


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from([r"(ab|c)+\d?", r"[^a]{3}", r"[a-z]+@\d+\.(de|com)", r"(x|y)*z", r"\s?é+"]), st.integers(0, 2**31)
)
def test_random_answers_match_their_regex(pattern: str, seed: int) -> None:
    answer = random_answer(matcher(Constraint.regex(pattern)), random.Random(seed))
    if answer is not None:
        assert re.fullmatch(pattern, text_of(answer))


def test_grammars_are_compiled_once_and_beside_the_caller() -> None:
    store = GrammarStore()
    with pytest.raises(ValueError, match="vocabulary"):
        store.compiling(Constraint.json(PERSON))
    store.learn(vocabulary(288))
    sampling = Sampling(max_tokens=9, eos_token_ids=(EOS,), constraint=Constraint.json(PERSON))
    first = store.preparing(sampling)
    assert first is not None
    assert store.compiling(Constraint.json(PERSON)) is first
    first.result(30)
    one, two = (store.follower(sampling, first) for _ in range(2))
    one.mask(spelt('{"name":"'), 0)
    second = two.mask([], 0)
    assert second is not None
    assert allowed(second) == allowed(matcher(Constraint.json(PERSON)).mask([], 0)), "each follows its own answer"
    with pytest.raises(RequestError, match="unclosed"):
        store.compiling(Constraint.regex("(")).result(30)
    thinking = Thinking(is_open=True, opening="<t>", end="</t>", budget=0, closing=(5, 6))
    budget = msgspec.structs.replace(sampling, constraint=None, thinking=thinking)
    known = store.preparing(budget)
    assert known is not None
    known.result(30)
    only = store.follower(budget, known).mask([1, 2], 2)
    assert only is not None
    assert allowed(only) == [5]
    assert store.preparing(Sampling(max_tokens=9)) is None
    store.close()


def chain(links: int) -> dict[str, Any]:
    """A chain of references, whose compilation overflows the stack."""
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"type": "string"}}}


@pytest.mark.seldom
def test_a_compiler_that_crashes_or_hangs_ends_only_its_request() -> None:
    async def go() -> None:
        checker = GrammarChecker()
        hostile = [Constraint.json(chain(20_000)), Constraint.json({"type": "integer", "multipleOf": 99_999_989})]
        good = [Constraint.json({**PERSON, "title": str(i)}) for i in range(6)]
        found = await asyncio.gather(*map(checker.check, [*hostile, *good, *hostile]), return_exceptions=True)
        assert [type(each) for each in found] == [RequestError] * 2 + [type(None)] * 6 + [RequestError] * 2
        assert "failed" in str(found[0])
        assert "5 s" in str(found[1])
        begin_s, seen = time.monotonic(), await asyncio.gather(*map(checker.check, hostile), return_exceptions=True)
        assert [str(each) for each in seen] == [str(each) for each in found[:2]]
        assert time.monotonic() - begin_s < 1.0, "verdicts are remembered"
        for process in checker._idle:
            process.kill()
            await process.wait()
        await checker.check(Constraint.json({**PERSON, "title": "after its process has ended"}))
        await checker.close()
        await checker.close()

    asyncio.run(go())


def test_a_grammar_without_texts_is_refused() -> None:
    assert "no text fulfils it" in verdict(Constraint.json({"$ref": "#"}), LLTokenizer("byte")).message
    assert not verdict(Constraint.json(PERSON), LLTokenizer("byte")).message


def test_constraints_cross_processes() -> None:
    pydantic = pytest.importorskip("pydantic")
    made = pydantic.create_model("Made", x=(int, ...))
    constraint = Constraint.json(made)
    assert json.loads(constraint.text)["required"] == ["x"]
    params = SamplingParams(constraint=constraint, thinking=Thinking(is_open=True, opening="<t>", end="</t>"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(constraint=constraint, ignore_eos=True)
    with pytest.raises(RequestError, match="cannot be written"):
        Constraint.json({"enum": [object()]})
