"""What the sampler must know of each row: the request's wishes and its tokens so far. Never: tensors."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from proa.types import Sampling


@dataclass(frozen=True)
class Row:
    """One row of logits: the next token of one sequence, whose `tokens` so far begin with the prompt."""

    sampling: Sampling
    tokens: Sequence[int]
    num_prompt: int

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self.num_prompt :]

    def uniform(self) -> float:
        """A number in [0, 1) that depends only on the seed and the position in the answer.

        So a request draws the same tokens whatever else is in the batch, and after a preemption.
        """
        key = struct.pack("<QQ", self.sampling.seed % 2**64, self.num_output)
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return (bits >> 11) / 2**53
