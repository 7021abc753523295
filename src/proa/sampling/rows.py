"""What the sampler must know of each row: the request's wishes and its tokens so far. Never: tensors."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from proa.types import Sampling


class Row(msgspec.Struct):
    """One row of logits: the next token of one sequence, whose `tokens` so far begin with the prompt.

    The list grows with the sequence, so that a row may be kept from step to step. `edits`: whether its wishes change
    logits at every position.
    """

    sampling: Sampling
    tokens: Sequence[int]
    num_prompt: int
    request: str = ""  # its id, the same from step to step
    edits: bool = False  # set here

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
        """Whether the request changes its logits before the draw."""
        return self.edits or len(self.tokens) - self.num_prompt < self.sampling.min_tokens

    @property
    def takes_best(self) -> bool:
        """Whether its token is the one with the largest logit."""
        return self.sampling.temperature == 0.0 and not self.is_adjusted

    def uniform(self) -> float:
        """A number in [0, 1) that depends only on the seed and the position in the answer.

        So a request draws the same tokens whatever else is in the batch, and after a preemption.
        """
        key = struct.pack("<QQ", self.sampling.seed % 2**64, self.num_output)
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) / 2**53
