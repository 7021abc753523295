"""Describes the reasoning at the beginning of an answer to the sampler, which enforces its budget."""

from __future__ import annotations

from collections.abc import Callable

from proa.parsers.choose import AnswerFormat, Place
from proa.types import Thinking


def describe(
    answers: AnswerFormat, begins: Place, encode: Callable[[str], list[int]], *, has_tools: bool, budget: int | None
) -> Thinking | None:
    """Describe the reasoning of an answer; None if it has none. begins: where the answer begins. encode: tokenises
    text, with special tokens."""
    reasoning = answers.reasoning
    if reasoning is None or begins == "after":
        return None
    return Thinking(
        is_open=begins == "inside",
        opening=reasoning.open,
        end=reasoning.close,
        calls=() if answers.calls is None or not has_tools else answers.calls.openings,
        budget=budget,
        closing=() if budget is None else tuple(encode(reasoning.closing)),
    )
