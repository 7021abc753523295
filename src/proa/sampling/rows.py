"""The sampler's per-row inputs: sampling parameters and the sequence's tokens."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from proa.grammar.matcher import Follower
from proa.types import Sampling


class Row(msgspec.Struct):
    """The sequence that a row of logits belongs to.

    `tokens`: prompt and answer so far; the list grows with the sequence, so that a Row may be kept from step to step.
    `matcher`: which tokens a constraint or a budget allows. `edits`: penalties or logit_bias change logits at every
    position.
    """

    sampling: Sampling
    tokens: Sequence[int]
    num_prompt: int
    request: str = ""  # the request's id, constant over steps
    matcher: Follower | None = None
    edits: bool = False  # computed by __post_init__

    def __post_init__(self) -> None:
        s = self.sampling
        self.edits = (
            s.repetition_penalty != 1.0
            or s.presence_penalty != 0.0
            or s.frequency_penalty != 0.0
            or bool(s.logit_bias)
        )  # fmt: skip

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self.num_prompt :]

    @property
    def delays_end(self) -> bool:
        """True if min_tokens forbids eos and stop tokens here. A matcher does that itself."""
        return self.num_output < self.sampling.min_tokens and self.matcher is None

    @property
    def is_adjusted(self) -> bool:
        """True if the request changes single logits before sampling."""
        return self.edits or self.delays_end

    @property
    def is_truncated(self) -> bool:
        """True if the token is sampled from the most likely ones only: top-k, top-p or min-p is set."""
        return self.sampling.top_k > 0 or self.sampling.top_p < 1.0 or self.sampling.min_p > 0.0

    @property
    def fault(self) -> str:
        """Why the request cannot go on; "" if it can."""
        return "" if self.matcher is None else self.matcher.fault

    @property
    def takes_argmax(self) -> bool:
        """True if the sampled token is the argmax of the unmodified logits: greedy, without adjustments and
        constraint."""
        return self.sampling.temperature == 0.0 and not self.is_adjusted and self.matcher is None

    def keeps(self, token: int) -> bool:
        """True if the row takes the argmax `token` of the unmodified logits: greedy, and the constraint allows it."""
        if self.takes_argmax or self.matcher is None or self.is_adjusted or self.sampling.temperature > 0.0:
            return self.takes_argmax
        mask = self.mask()
        return mask is None or bool(mask[token // 32] >> (token % 32) & 1)

    def mask(self) -> NDArray[np.int32] | None:
        """Return the tokens that may come next (see Follower.mask); None: all."""
        return None if self.matcher is None else self.matcher.mask(self.tokens, self.num_prompt)

    def uniform(self) -> float:
        """Return the random number in [0, 1) for the next token. It depends only on the seed and the position in the
        answer, so that batching and preemption do not change the sampled tokens."""
        key = struct.pack("<QQ", self.sampling.seed % 2**64, self.num_output)
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) / 2**53
