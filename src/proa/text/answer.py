"""Whole answers: folds over a stream of chunks. Belongs here: the fold. Never: a second way to make text."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from proa.errors import NOT_FINITE, EngineDead, NumericsError
from proa.types import Chunk, FinishReason, TokenLogprob


class Choice(msgspec.Struct, kw_only=True):
    """One of the n answers. `logprobs` belongs to `tokens`; `stop_reason` is the stop string or token."""

    index: int
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    error: str = ""  # what finish "error" means
    stop_reason: str | int | None = None


class Answer(msgspec.Struct, kw_only=True):
    """What one prompt gave. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: list[int] = []
    choices: list[Choice] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices together."""
        return sum(len(choice.tokens) for choice in self.choices)


class AnswerFold:
    """Adds chunks up to an Answer, O(1) amortised per chunk."""

    def __init__(self) -> None:
        self._answer = Answer()
        self._choices: dict[int, Choice] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, chunk: Chunk) -> None:
        choice = self._choices.setdefault(chunk.index, Choice(index=chunk.index))
        self._texts.setdefault(chunk.index, []).append(chunk.text)
        choice.tokens += chunk.tokens
        if chunk.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = []
            choice.logprobs += chunk.logprobs
        if chunk.finish is not None:
            choice.finish, choice.stop_reason, choice.error = chunk.finish, chunk.stop_reason, chunk.error
        if chunk.prompt_tokens is not None:
            self._answer.prompt_tokens = chunk.prompt_tokens
        if chunk.prompt_logprobs is not None:
            self._answer.prompt_logprobs = chunk.prompt_logprobs
        if chunk.index == 0 and chunk.cached_tokens is not None:
            self._answer.cached_tokens = chunk.cached_tokens

    def result(self) -> Answer:
        """The answer so far, choices in order."""
        for index, pieces in self._texts.items():
            self._choices[index].text = "".join(pieces)
        self._answer.choices = [self._choices[index] for index in sorted(self._choices)]
        return self._answer


def complete(answer: Answer) -> Answer:
    """`answer` itself. Raises EngineDead or NumericsError if a choice ended before its end."""
    for choice in answer.choices:
        if choice.finish == "abort":
            raise EngineDead(
                f"The engine was stopped after {len(choice.tokens)} tokens of the answer.", "Ask again once it runs."
            )
        if choice.finish == "error":
            raise broken_answer(choice.error)
    return answer


def broken_answer(why: str) -> NumericsError:
    """Of an answer that ended with "error": the engine ends one so when the model's values are not finite."""
    return NumericsError(why or "The model's logits were not finite.", NOT_FINITE)


def fold(chunks: Iterable[Chunk]) -> Answer:
    """The answer that `chunks` add up to."""
    answer = AnswerFold()
    for chunk in chunks:
        answer.add(chunk)
    return answer.result()
