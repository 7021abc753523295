"""Reasoning before an answer: its budget, and the constraint that begins after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from proa.grammar.lexicon import Lexicon, bits_of
from proa.grammar.matcher import Matcher
from proa.types import Thinking

# "before": the answer may still begin its reasoning. "inside": it reasons. "closing": the budget is spent.
_State = Literal["before", "inside", "closing", "after"]


class ThinkingMatcher:
    """A Follower of an answer that begins with reasoning, which is free; `inner` follows the text after it.

    When the budget is spent, only the tokens of `closing` are allowed, one after the other. Stop tokens are not allowed
    inside reasoning that a constraint waits for.
    """

    def __init__(
        self, thinking: Thinking, lexicon: Lexicon, stops: Collection[int], min_tokens: int, inner: Matcher | None
    ) -> None:
        self._thinking, self._tokens, self._inner, self._min_tokens = thinking, lexicon.tokens, inner, min_tokens
        self._opening, self._end = thinking.opening.strip().encode(), thinking.end.encode()
        self._calls = [call.encode() for call in thinking.calls]
        self._num_words = lexicon.num_words
        self._openings = bits_of(lexicon.tokens_of(self._opening), lexicon.num_words)
        self._no_stop = lexicon.existing & ~bits_of(stops, lexicon.num_words)
        self._state: _State = "inside" if thinking.is_open else "before"
        self._text = b""  # in "before": the answer; in "inside": its end
        self._num_followed = 0
        self._num_inside = 0  # tokens of reasoning
        self._num_closed = 0  # tokens of `closing` that were generated
        self._is_counted = thinking.budget is not None
        self._begin = 0  # generated tokens before those that `inner` follows
        self._check_budget()

    @property
    def fault(self) -> str:
        """See Follower.fault."""
        return "" if self._inner is None else self._inner.fault

    def mask(self, tokens: Sequence[int], num_prompt: int) -> NDArray[np.int32] | None:
        """See Follower.mask."""
        for token in tokens[num_prompt + self._num_followed :]:
            self._num_followed += 1
            self._follow(token)
        if self._state == "closing":
            return bits_of((self._thinking.closing[self._num_closed],), self._num_words)
        if self._inner is None:
            return self._no_stop if len(tokens) - num_prompt < self._min_tokens else None
        if self._state == "inside":
            return self._no_stop
        mask = self._inner.mask(tokens, num_prompt + self._begin)
        return mask | self._openings if self._state == "before" else mask

    def _follow(self, token: int) -> None:
        match self._state:
            case "before":
                self._begin_with(token)
            case "inside":
                self._reason(self._tokens[token])
            case "closing":
                self._num_closed += 1
                if self._num_closed == len(self._thinking.closing):
                    self._finish()

    def _begin_with(self, token: int) -> None:
        """Follow the answer's first tokens. Where there is a constraint, the first one decides."""
        self._text = (self._text + self._tokens[token]).lstrip()
        if self._inner is not None:
            self._state = "inside" if self._tokens[token] == self._opening else "after"
        elif self._text.startswith(self._opening):
            self._state = "inside"
        elif not self._opening.startswith(self._text):
            self._state = "after"
        if self._state == "inside":
            self._text = b""
            self._check_budget()

    def _reason(self, text: bytes) -> None:
        text = self._text + text
        if self._end in text:
            self._finish()
            return
        self._num_inside += 1
        if any(call in text for call in self._calls):
            self._is_counted = False
        self._text = text[-max(map(len, (self._end, *self._calls))) :]
        self._check_budget()

    def _check_budget(self) -> None:
        budget = self._thinking.budget
        if self._state == "inside" and self._is_counted and budget is not None and self._num_inside >= budget:
            self._state = "closing"

    def _finish(self) -> None:
        self._state, self._begin = "after", self._num_followed
