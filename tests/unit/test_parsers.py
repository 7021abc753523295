"""Laws of every parser: chunks do not matter, nothing is lost, a call is complete or text, nothing raises."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answer_texts import (
    NAMES,
    THINKS,
    WRITERS,
    Read,
    Vocabulary,
    format_of,
    markers_of,
    read,
    vocabulary,
)
from examples import examples
from proa.parsers.calls import Tools
from proa.parsers.choose import HARMONY
from proa.parsers.events import ChoiceParser
from proa.types import FinishReason

TOOLS = Tools.of(
    [
        {"function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in {
            "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}},
            "run.it": {"code": {"type": "string"}, "all": {"type": "boolean"}, "list": {"type": "array"}},
            "now": {},
        }.items()
    ]
)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Zürich 🦊", "days": 3, "zip": "007"}),
    ("run.it", {"code": 'if a < b:\n    print("{x}")', "all": True, "list": [1, {"a": None}]}),
    ("now", {}),
]
THINK_OF = {"gemma4": "gemma4", "mistral": "mistral", HARMONY: HARMONY}


def parse(
    name: str,
    pieces: list[str],
    words: Vocabulary,
    *,
    cuts: list[int] | None = None,
    finish: FinishReason = "stop",
    prompt: str = "",
    tools: Tools | None = TOOLS,
) -> Read:
    """Parse an answer given piece by piece; cuts: lengths of the chunks, repeated; None: in one."""
    text, marks = words.marks(pieces)
    parser = format_of(name, THINK_OF.get(name, "qwen3"), words).parser(tools, prompt, "", 0)
    events, at, turn = [], 0, 0
    while at < len(text):
        size = len(text) if not cuts else max(1, cuts[turn % len(cuts)])
        turn += 1
        events += parser.feed(text[at : at + size], [m - at for m in marks if at <= m < at + size])
        at += size
    return read(events + parser.finish(finish))


def both(name: str) -> list[Vocabulary]:
    return [vocabulary(name, THINK_OF.get(name, "qwen3"), as_tokens=as_tokens) for as_tokens in (True, False)]


def is_whole_message(name: str) -> bool:
    """Formats whose calls last to the answer's end: text behind one belongs to it."""
    return name in ("llama3_json", "mistral")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", CALLS, ids=[name for name, _ in CALLS])
def test_one_call(name: str, call: tuple[str, dict[str, Any]]) -> None:
    for write in WRITERS[name]:
        for words in both(name):
            for cuts in (None, [1], [2], [5, 3]):
                got = parse(name, words.split(write(*call)), words, cuts=cuts)
                assert [(n, json.loads(a)) for n, a in got.calls] == [call]
                assert (got.text, got.reasoning) == ("", "")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_text_and_calls(name: str) -> None:
    """Text before, between and behind calls survives, without the whitespace at the delimiters."""
    for write in WRITERS[name]:
        for words in both(name):
            texts = ["Let me look.", " And then", "Done."]
            if is_whole_message(name):
                raw = f"{texts[0]}\n{write(*CALLS[0])}{write(*CALLS[1])}"
                texts = texts[:1]
            else:
                raw = f"{texts[0]}\n{write(*CALLS[0])}\n{texts[1]}\n\n{write(*CALLS[1])}\n{texts[2]}"
            if name == HARMONY:
                frame = "<|start|>assistant<|channel|>final<|message|>{}<|end|><|start|>assistant"
                raw = "<|channel|>analysis<|message|>Hm, hm.<|end|>" + "".join(
                    (frame.format(texts[0]), write(*CALLS[0]), frame.format(texts[1]), write(*CALLS[1]))
                )
                texts = texts[:2]
            else:
                begin, end = THINKS[THINK_OF.get(name, "qwen3")]
                raw = f"{begin}\nHm, hm.\n{end}\n\n{raw}"
            got = parse(name, words.split(raw), words, cuts=[1])
            assert got == parse(name, words.split(raw), words) or got.ids  # ids are random
            assert [(n, json.loads(a)) for n, a in got.calls] == CALLS[:2]
            assert got.reasoning == "Hm, hm."
            assert "".join(got.text.split()) == "".join("".join(texts).split())


@pytest.mark.parametrize("name", NAMES)
def test_half_a_call_is_text(name: str) -> None:
    """max_tokens cuts a call off: what was not complete is text, with its delimiter."""
    for write in WRITERS[name]:
        raw = write(*CALLS[0])
        for words in both(name):
            for length in range(len(raw)):
                got = parse(name, words.split(raw[:length]), words, finish="length", cuts=[3])
                if got.calls:
                    assert [(n, json.loads(a)) for n, a in got.calls] == [CALLS[0]]
                elif "city" in raw[:length]:
                    assert "get_weather" in got.text
                    assert "city" in got.text


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", ["hermes", HARMONY])
@settings(max_examples=examples(30), deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_tokens_of_one_chunk_are_counted_one_by_one(name: str, as_tokens: bool, sizes: list[int]) -> None:
    """A server that is behind joins tokens: the end of the reasoning may lie within a chunk."""
    words = vocabulary(name, THINK_OF.get(name, "qwen3"), as_tokens=as_tokens)
    if name == HARMONY:
        raw = "<|channel|>analysis<|message|>Hm, hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."
    else:
        raw = "<think>\nHm, hm.\n</think>\n\nSunny." + WRITERS[name][0](*CALLS[0])
    tokens = [
        token
        for piece in words.split(raw)
        for token in ([piece] if piece in words.tokens else [piece[i : i + 3] for i in range(0, len(piece), 3)])
    ]

    def parsed(sizes: list[int]) -> tuple[int, Read]:
        parser = ChoiceParser(format_of(name, THINK_OF.get(name, "qwen3"), words).parser(TOOLS, "", "", 0))
        events, found, at, turn = [], 0, 0, 0
        while at < len(tokens):
            some = tokens[at : at + sizes[turn % len(sizes)]]
            at, turn = at + len(some), turn + 1
            text, marks = words.marks(some)
            ends = list(accumulate(map(len, some)))
            one = parser.feed(text, marks, "stop" if at >= len(tokens) else None, ends)
            assert all(type(first) is not type(second) for first, second in pairwise(one.events))
            events, found = events + one.events, found + one.reasoning_tokens
        return found, replace(read(events), ids=())

    alone, answer = parsed([1])
    assert 2 <= alone < len(tokens)
    assert parsed(sizes) == (alone, answer)


@pytest.mark.parametrize("name", [n for n in NAMES if n != HARMONY])
def test_a_call_ends_an_unclosed_reasoning(name: str) -> None:
    begin, end = THINKS[THINK_OF.get(name, "qwen3")]
    for words in both(name):
        raw = f"I should ask.\n{WRITERS[name][0](*CALLS[0])}"
        got = parse(name, words.split(raw), words, prompt=f"<|assistant|>{begin}", cuts=[4])
        assert [(n, json.loads(a)) for n, a in got.calls] == [CALLS[0]]
        assert (got.reasoning, got.text) == ("I should ask.", "")
    words = both(name)[0]
    assert parse(name, words.split(f"hm{end}yes"), words, prompt=begin).reasoning == "hm"


@pytest.mark.parametrize("name", [n for n in NAMES if n != HARMONY])
def test_the_look_of_a_token_is_text(name: str) -> None:
    """If the vocabulary has a delimiter as a token, the same characters in other tokens are text."""
    begin, end = THINKS[THINK_OF.get(name, "qwen3")]
    words = both(name)[0]
    for raw in (f"It writes {begin}so{end} there", "See " + WRITERS[name][0](*CALLS[0])):
        pieces = list(raw)  # one ordinary token per character
        if name in ("qwen3_coder", "step3p5"):
            raw = raw.replace("<function=", "<funktion=")
            pieces = list(raw)
        got = parse(name, pieces, words, cuts=[2])
        assert got == Read(raw, "", (), ())


JSON_BETWEEN = ("hermes", "deepseek_v31", "kimi_k2", "nemotron")


@pytest.mark.parametrize("name", JSON_BETWEEN)
@pytest.mark.parametrize("cuts", [None, [1], [5, 3]])
def test_a_delimiter_inside_a_string_is_text(name: str, cuts: list[int] | None) -> None:
    """Also as a token: models that write about calls generate it there. If the string has no end, tokens end the text
    that is no call, and the next call is read."""
    for write in WRITERS[name]:
        for words in both(name):
            for delimiter in markers_of(name):
                call = "get_weather", {"city": f"a{delimiter}b", "days": 3}
                got = parse(name, words.split(f"{write(*call)}\nSo."), words, cuts=cuts)
                assert [(n, json.loads(a)) for n, a in got.calls] == [call], delimiter
                assert got.text == "So."
        for city in ("a", "b"):
            unclosed = write("get_weather", {"zip": "a", "city": "b"}).replace(f'"{city}"', f'"{city}')
            words = both(name)[0]
            got = parse(name, words.split(f"{unclosed}\n{write(*CALLS[0])}"), words, cuts=cuts)
            assert [(n, json.loads(a)) for n, a in got.calls] == CALLS[:1]
            assert f'"{city}' in got.text


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_calls_are_text(name: str) -> None:
    words = Vocabulary(())
    raw = WRITERS[name][0](*CALLS[0])
    got = parse(name, [raw], words, tools=None)
    assert not got.calls
    assert "Zürich" in got.text


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_no_marker_leaks(name: str, as_tokens: bool, data: st.DataObject) -> None:
    """For any well-formed answer: reasoning, then text and calls in any order, each in its place and whole."""
    words = vocabulary(name, THINK_OF.get(name, "qwen3"), as_tokens=as_tokens)
    thought = data.draw(st.sampled_from(["", "Hm, hm.", "Is 3 < 4?\nYes."]))
    kinds = data.draw(st.lists(st.sampled_from(["text", "call"]), max_size=5))
    if is_whole_message(name):  # text behind a call belongs to it
        kinds.sort(key=lambda kind: kind == "call")
    texts: list[str] = []
    called: list[tuple[str, dict[str, Any]]] = []
    parts: list[str] = []
    for number, kind in enumerate(kinds):
        if kind == "text":
            texts.append(f"Text {number}: a < b > c.")
            final = f"<|channel|>final<|message|>{texts[-1]}<|end|>"
            parts.append(final if name == HARMONY else f"\n{texts[-1]}\n")
        else:
            called.append(data.draw(st.sampled_from(CALLS)))
            parts.append(data.draw(st.sampled_from(WRITERS[name]))(*called[-1]))
    if thought:
        begin, end = THINKS.get(THINK_OF.get(name, "qwen3"), ("", ""))
        parts.insert(0, f"<|channel|>analysis<|message|>{thought}<|end|>" if name == HARMONY else begin + thought + end)
    raw = "<|start|>assistant".join(parts) if name == HARMONY else "".join(parts)
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    got = parse(name, words.split(raw), words, cuts=cuts)
    assert [(n, json.loads(a)) for n, a in got.calls] == called
    assert got.reasoning == thought
    assert "".join(got.text.split()) == "".join("".join(texts).split())


@st.composite
def answers(draw: st.DrawFn, name: str) -> list[str]:
    """Pieces of delimiters, calls whole and cut, and numbered words."""
    begin_end = THINKS.get(THINK_OF.get(name, "qwen3"), ())
    shapes = [*markers_of(name), *begin_end, "\n", " ", "{", "}", "[", "]", '"', "<", "<think", "arg", "assistant"]
    calls = [write(f, a) for write in WRITERS[name] for f, a in CALLS]
    pieces: list[str] = []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["marker", "marker", "word", "call", "cut", "garbage"]))
        if kind == "marker":
            pieces.append(draw(st.sampled_from(shapes)))
        elif kind == "word":
            pieces.append(f"w{number}w")
        elif kind == "garbage":
            pieces.append(draw(st.text("<>|/ab{}[]\"'=:,\n", max_size=8)))
        else:
            call = draw(st.sampled_from(calls))
            pieces.append(call if kind == "call" else call[: draw(st.integers(0, len(call)))])
    return pieces


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_laws(name: str, as_tokens: bool, data: st.DataObject) -> None:
    """For any answer: chunks do not matter; every word is in the text, the reasoning or a call; arguments are JSON."""
    words = vocabulary(name, THINK_OF.get(name, "qwen3"), as_tokens=as_tokens)
    drawn = data.draw(answers(name))
    pieces = [part for piece in drawn for part in (words.split(piece) if data.draw(st.booleans()) else list(piece))]
    finish: FinishReason = data.draw(st.sampled_from(["stop", "length"]))
    prompt = data.draw(st.sampled_from(["", *THINKS.get(THINK_OF.get(name, "qwen3"), ())]))
    whole = parse(name, pieces, words, finish=finish, prompt=prompt)
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    for sizes in ([1], cuts):
        pieced = parse(name, pieces, words, finish=finish, prompt=prompt, cuts=sizes)
        assert (pieced.text, pieced.reasoning, pieced.calls) == (whole.text, whole.reasoning, whole.calls)
    said = whole.text + whole.reasoning + "".join(n + a for n, a in whole.calls)
    for piece in drawn:
        if piece.startswith("w") and piece.endswith("w") and piece[1:-1].isdigit():
            assert piece in said, (piece, "".join(pieces))
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("<|constrain|>w1w", "w1w"),
        ("<|constrain|>hello", "hello"),
        ("<|channel|>final <|constrain|>json", ""),
        ("<|constrain|>w1w<|message|>yes", "w1wyes"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        ("<|channel|>final <|constrain|>yaml<|message|>a: 1", "a: 1"),
    ],
)
def test_what_is_no_type_of_content_is_text(raw: str, text: str) -> None:
    for words in both("gpt_oss"):
        found = parse("gpt_oss", words.split(raw), words, cuts=[2])
        assert (found.text, found.reasoning, found.calls) == (text, "", ())


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_header_of_a_call_without_arguments_is_text(finish: FinishReason) -> None:
    pieces = ["<|channel|>", "commentary to=", "w1w"]
    words = vocabulary("gpt_oss", THINK_OF.get("gpt_oss", "qwen3"), as_tokens=False)
    found = parse("gpt_oss", pieces, words, finish=finish, prompt="")
    assert (found.text, found.reasoning, found.calls) == ("commentary to=w1w", "", ())
