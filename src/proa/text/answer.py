"""Complete answers, accumulated from a stream of chunks."""

from __future__ import annotations

import msgspec

from proa.errors import NOT_FINITE, EngineDead, NumericsError
from proa.types import Chunk, FinishReason, TokenLogprob


class Choice(msgspec.Struct, kw_only=True):
    """One of the n answers to a prompt. `logprobs` has one entry per token; `stop_reason` is the stop string or stop
    token that ended it, None for eos and length."""

    index: int
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    error: str = ""  # the message if finish is "error"
    stop_reason: str | int | None = None
    score: float | None = None  # only in beam search: sum of logprobs / length ** length_penalty


class Answer(msgspec.Struct, kw_only=True):
    """The n choices generated for one prompt. `cached_tokens`: prompt tokens that came from the prefix cache."""

    prompt_tokens: list[int] = []
    choices: list[Choice] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens, summed over all choices."""
        return sum(len(choice.tokens) for choice in self.choices)


class AnswerFold:
    """Accumulates chunks into an Answer, O(1) amortised per chunk."""

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
            choice.score = chunk.score
        if chunk.prompt_tokens is not None:
            self._answer.prompt_tokens = chunk.prompt_tokens
        if chunk.prompt_logprobs is not None:
            self._answer.prompt_logprobs = chunk.prompt_logprobs
        if chunk.index == 0 and chunk.cached_tokens is not None:
            self._answer.cached_tokens = chunk.cached_tokens

    def result(self) -> Answer:
        """Return the answer accumulated so far, choices in order of their index."""
        for index, pieces in self._texts.items():
            self._choices[index].text = "".join(pieces)
        self._answer.choices = [self._choices[index] for index in sorted(self._choices)]
        return self._answer


def require_complete(answer: Answer) -> Answer:
    """Return `answer` unchanged. Raises EngineDead or NumericsError if a choice finished with "abort" or "error"."""
    for choice in answer.choices:
        if choice.finish == "abort":
            raise EngineDead(
                f"The engine was stopped after {len(choice.tokens)} tokens of the answer.",
                "Restart the engine and send the request again.",
            )
        if choice.finish == "error":
            raise numerics_error(choice.error)
    return answer


def numerics_error(why: str) -> NumericsError:
    """Build the error for finish "error", with which the engine ends a sequence whose logits are NaN or Inf."""
    return NumericsError(why or "The model's logits were not finite.", NOT_FINITE)
