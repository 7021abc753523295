"""The sampler's per-row inputs: sampling parameters and the sequence's tokens."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from proa.types import Sampling


class Row(msgspec.Struct):
    """The sequence that a row of logits belongs to.

    `tokens`: prompt and answer so far; the list grows with the sequence, so that a Row may be kept from step to step.
    `edits`: penalties or logit_bias change logits at every position.
    """

    sampling: Sampling
    tokens: Sequence[int]
    num_prompt: int
    request: str = ""  # the request's id, constant over steps
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
    def is_adjusted(self) -> bool:
        """True if the request changes its logits before sampling."""
        return self.edits or len(self.tokens) - self.num_prompt < self.sampling.min_tokens

    @property
    def takes_argmax(self) -> bool:
        """True if the sampled token is the argmax of the unmodified logits: greedy, without adjustments."""
        return self.sampling.temperature == 0.0 and not self.is_adjusted

    def uniform(self) -> float:
        """Return the random number in [0, 1) for the next token. It depends only on the seed and the position in the
        answer, so that batching and preemption do not change the sampled tokens."""
        key = struct.pack("<QQ", self.sampling.seed % 2**64, self.num_output)
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) / 2**53
