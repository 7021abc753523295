"""The tokens that may come next in one answer. Never: compiling, logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from proa.grammar.lexicon import Lexicon, bits_of


class Follower(Protocol):
    """Tracks one answer and computes which tokens may come next."""

    @property
    def fault(self) -> str:
        """Why the answer cannot go on, "" while it can; the request must then end with this error."""

    def mask(self, tokens: Sequence[int], num_prompt: int) -> NDArray[np.int32] | None:
        """Return the allowed tokens after `tokens`, a prompt and its answer so far, as bits: token t is bit t % 32 of
        word t // 32. int32 [vocab // 32 + 1]; valid until the next call. None: all tokens."""


class Matcher:
    """Follows an answer through its grammar. Its state depends on the generated tokens only, which a preemption keeps.

    Stop tokens are allowed where the grammar is complete and `min_tokens` are reached, or where nothing else is
    possible.
    """

    def __init__(self, parser: LLMatcher, lexicon: Lexicon, stops: Collection[int], min_tokens: int = 0) -> None:
        """parser: at its start, and of this request alone. stops: its eos and stop token ids, one at least."""
        self._parser, self._min_tokens = parser, min_tokens
        self._stops = bits_of(stops, lexicon.num_words)
        self._end = bits_of((lexicon.end,), lexicon.num_words)
        self._mask = np.zeros(lexicon.num_words, np.int32)
        self._num_read = -1  # generated tokens that the mask follows
        self._num_followed = 0
        self.fault = ""

    def mask(self, tokens: Sequence[int], num_prompt: int) -> NDArray[np.int32]:
        """See Follower.mask."""
        num_output = len(tokens) - num_prompt
        if num_output != self._num_read:
            for token in tokens[num_prompt + self._num_followed :]:
                if not self.fault and not self._parser.consume_token(token):
                    self.fault = f"The constraint's grammar failed at token {token}: {_first_line(self._parser)}."
            self._num_followed = self._num_read = num_output
            self._fill(num_output)
        return self._mask

    def _fill(self, num_output: int) -> None:
        mask = self._mask
        if not self.fault:
            self._parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._parser.is_error():
                self.fault = f"The constraint's grammar has no next token: {_first_line(self._parser)}."
        if self.fault:
            mask[:] = self._stops
            return
        complete = bool((mask & self._end).any())
        mask &= ~(self._stops | self._end)
        goes_on = bool(mask.any())
        if complete and (num_output >= self._min_tokens or not goes_on):
            mask |= self._stops
        elif not goes_on:
            self.fault = "The constraint and the stop tokens leave no token to continue with."
            mask[:] = self._stops


def _first_line(parser: LLMatcher) -> str:
    return str(parser.get_error()).partition("\n")[0] or "unknown"
