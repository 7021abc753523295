"""Recorded conversations of each model family (record_transcripts.py), replayed at every chunking: several turns,
calls, reasoning, a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from answer_texts import Read, Vocabulary, format_of, read, vocabulary
from proa.parsers.calls import Tools
from proa.parsers.choose import CALL_NAMES, HARMONY, AnswerFormat
from record_transcripts import FILE, TOOLS

RECORDED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
DECLARED = Tools.of(TOOLS)


def chunkings(length: int) -> Iterator[list[int]]:
    """Ends of chunks: equal ones of each size, and each division into two."""
    for size in (1, 2, 3, 5, 7, 11, 17, 64, length):
        yield [*range(size, length, size), length]
    for at in range(1, length):
        yield [at, length]


def replay(answers: AnswerFormat, prompt: str, text: str, marks: list[int], ends: list[int]) -> Read:
    parser = answers.parser(DECLARED, prompt, "", 0)
    events, begin = [], 0
    for end in ends:
        events += parser.feed(text[begin:end], [mark - begin for mark in marks if begin <= mark < end])
        begin = end
    return read(events + parser.finish("stop"))


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", RECORDED)
def test_replay(name: str, as_tokens: bool) -> None:
    calls, reasoning = RECORDED[name]["calls"], RECORDED[name]["reasoning"]
    words = vocabulary(calls, reasoning, as_tokens=as_tokens) if as_tokens else Vocabulary(())
    answers = format_of(calls, reasoning, words)
    for turn in RECORDED[name]["turns"]:
        text, marks = words.marks(words.split(turn["answer"]))
        for ends in chunkings(len(text)):
            got = replay(answers, turn["prompt"], text, marks, ends)
            assert (got.text.strip(), got.reasoning.strip()) == (turn["text"], turn["reasoning"]), ends
            assert [[n, json.loads(a)] for n, a in got.calls] == turn["calls"], ends


def test_every_family_is_recorded() -> None:
    formats = {talk["calls"] for talk in RECORDED.values()}
    assert formats == {*CALL_NAMES, HARMONY} - {"auto", "none"}
    for name, talk in RECORDED.items():
        assert len(talk["turns"]) >= 3, name
        assert sum(bool(turn["calls"]) for turn in talk["turns"]) >= 1, name
        assert sum("sorry" in turn["text"] for turn in talk["turns"]) == 1, name
    assert len({talk["reasoning"] for talk in RECORDED.values()}) >= 9
