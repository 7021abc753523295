"""Budgets of reasoning, and constraints that begin after it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from answer_texts import THINKS, Vocabulary, format_of, vocabulary
from grammars import EOS, MARK, allowed, lexicon, thinker
from proa.grammar.thinking import ThinkingMatcher
from proa.parsers.choose import HARMONY
from proa.parsers.thinking import describe
from proa.types import Constraint, Thinking

END = lexicon().tokens.index(b"</think>")
CLOSING = (*b"Enough.", END)
THINK = Thinking(is_open=True, opening="<think>", end="</think>", calls=("<call>",), budget=5, closing=CLOSING)
YES = Constraint.choice(["yes"])


def next_of(follower: ThinkingMatcher, text: Sequence[int]) -> list[int] | None:
    """The allowed tokens after an answer; None: all."""
    mask = follower.mask([7, 7, *text], 2)
    return None if mask is None else allowed(mask)


def forced(follower: ThinkingMatcher, text: Sequence[int], most: int = 50) -> list[int]:
    """The tokens that follow `text` as long as only one is allowed."""
    answer = list(text)
    for _ in range(most):
        only = next_of(follower, answer)
        if only is None or len(only) != 1:
            break
        answer += only
    return answer[len(text) :]


def test_a_spent_budget_closes_the_reasoning() -> None:
    follower, text = thinker(THINK), [*b"abcde"]
    for length in range(5):
        assert next_of(follower, text[:length]) is None
    assert forced(follower, text) == list(CLOSING)
    assert next_of(follower, [*text, *CLOSING]) is None
    assert next_of(follower, [*text, *CLOSING, *b" much more text", EOS]) is None


@pytest.mark.parametrize(
    ("changes", "text", "is_forced"),
    [
        ({"budget": 0}, b"", True),
        ({"budget": None}, b"abcdefgh", False),
        ({}, b"abc</think>defgh", False),
        ({"budget": 7}, b"<call>{}", False),
        ({"is_open": False}, b"abcdefgh", False),
        ({"is_open": False}, b"<thi", False),
        ({"is_open": False}, b"\n<think>abcd", False),
        ({"is_open": False}, b"\n<think>abcde", True),
        ({"is_open": False, "budget": 0}, b"<think>", True),
    ],
)
def test_what_counts(changes: dict[str, object], text: bytes, is_forced: bool) -> None:
    thinking = msgspec.structs.replace(THINK, **changes)
    assert forced(thinker(thinking), list(text)) == (list(CLOSING) if is_forced else [])
    stepwise = thinker(thinking)
    for length in range(len(text) + 1):
        found = next_of(stepwise, text[:length])
        assert found == next_of(thinker(thinking), text[:length]), "the state depends on the tokens alone"


def test_a_constraint_begins_after_the_reasoning() -> None:
    follower = thinker(msgspec.structs.replace(THINK, budget=None), YES)
    free = next_of(follower, b"any {text</thi")
    assert free is not None
    assert EOS not in free
    assert {ord("y"), ord("<"), MARK} <= set(free)
    assert next_of(follower, b"any {text</think>") == [ord("y")]
    assert next_of(thinker(THINK, YES), [*b"hm", END, *b"yes"]) == [EOS], "several tokens since the last mask"


def test_a_budget_and_a_constraint() -> None:
    assert forced(thinker(THINK, YES), b"abcde", most=len(CLOSING) + 4) == [*CLOSING, *b"yes", EOS]


def test_a_constrained_answer_may_begin_its_reasoning() -> None:
    before = Thinking(is_open=False, opening="<mark>", end="</think>")
    assert next_of(thinker(before, YES), b"") == sorted([ord("y"), MARK])
    assert next_of(thinker(before, YES), b"y") == [ord("e")]
    inside = next_of(thinker(before, YES), [MARK, *b"hm"])
    assert inside is not None
    assert len(inside) > 100
    assert next_of(thinker(before, YES), [MARK, *b"hm", END]) == [ord("y")]
    unknown = msgspec.structs.replace(before, opening="<no token>")
    assert next_of(thinker(unknown, YES), b"") == [ord("y")]


def test_min_tokens_without_a_constraint() -> None:
    follower = thinker(THINK, min_tokens=3)
    early = next_of(follower, b"ab")
    assert early is not None
    assert EOS not in early
    assert next_of(follower, b"abc") is None


@pytest.mark.parametrize("name", [*THINKS, HARMONY])
def test_every_format_of_reasoning_can_be_closed(name: str) -> None:
    """The closing text, parsed, ends the reasoning, and nothing of it is in the answer."""
    calls = HARMONY if name == HARMONY else "hermes"
    words = vocabulary(calls, name, as_tokens=True)
    answers = format_of(calls, name, words)
    assert answers.reasoning is not None
    opening, closing = answers.reasoning.open, answers.reasoning.closing
    frame = "<|start|>assistant<|channel|>final<|message|>" if name == HARMONY else ""
    text, marks = words.marks(words.split(f"{opening}Hm{closing}{frame}Yes."))
    parser = answers.parser(None, "", "", 0)
    events = parser.feed(text, marks) + parser.finish("stop")
    said = "".join(e.text for e in events if type(e).__name__ == "Text")
    assert said == "Yes."
    assert answers.reasoning.close in closing


def test_descriptions() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    answers = format_of("hermes", "deepseek_r1", Vocabulary(("<think>", "</think>")))
    asked = {
        "<|assistant|>": "before",
        "<|assistant|><think>\n": "inside",
        "<|assistant|><think>\n\n</think>\n\n": "after",
    }
    assert {prompt: answers.place(prompt, "") for prompt in asked} == asked
    assert answers.place("<|assistant|>", "The answer") == "after"
    for place in ("before", "inside"):
        found = describe(answers, place, encode, has_tools=True, budget=9)
        assert found == Thinking(
            is_open=place == "inside", opening="<think>", end="</think>", calls=("<tool_call>",),
            budget=9, closing=tuple(b"\n</think>"),
        )  # fmt: skip
    assert describe(answers, "after", encode, has_tools=True, budget=9) is None
    assert describe(format_of("hermes", "none", Vocabulary(())), "before", encode, has_tools=False, budget=1) is None
