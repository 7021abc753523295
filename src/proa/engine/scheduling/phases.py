"""Which of a request's tokens are computed as a prompt and which by decode, and which of their pages others may use.
Never: pages, the order of service.

With `--deterministic` a token's bits must not depend on the schedule (docs/decisions/040). So the phase of a token
follows from its position alone: prompt tokens are computed as a prompt, generated ones by decode, also after a
preemption, one a step. Only pages of prompt tokens are shared, for a page that decode filled has other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from proa.engine.scheduling.request import Request

# Up to 4 rows of a sequence go through the CPU's attention as decode does, which adds in another order (kDirectQueries
# of csrc/src/attention.cc). If the last step of a prompt has more, its bits are the same with a prefix from the cache
# as without.
LEAST_ROWS_ON_CPU = 5


class Phases(Protocol):
    @property
    def one_chunk(self) -> bool:
        """Whether a step has at most one chunk of a prompt."""

    @property
    def one_decode(self) -> bool:
        """Whether a step of decode has one request."""

    def decodes(self, request: Request) -> bool:
        """Whether its next step is one of decode: one token."""

    def chunk_tokens(self, request: Request, room_tokens: int) -> int:
        """Tokens of its prompt that the next step computes, where there is room for `room_tokens`."""

    def shared_tokens(self, request: Request, computed_tokens: int) -> int:
        """How many of the first computed tokens may be shared: the prefix cache gets their full pages."""

    def matched_tokens(self, request: Request) -> int:
        """The most tokens that it may take from the prefix cache: something is left for a step of prompts."""

    def whole_tokens(self, num_tokens: int) -> int:
        """Of so many tokens that the prefix cache has of a prompt, those that a request goes on from."""


@dataclass(frozen=True)
class FreePhases:
    """What is left of a request is decode if it is one token, else a prompt: the fastest kernels for each step.

    least_tokens: the last step of a prompt has so many of its tokens, if it has as many.
    """

    least_tokens: int = 1
    one_chunk: ClassVar[bool] = False
    one_decode: ClassVar[bool] = False

    def decodes(self, request: Request) -> bool:
        return request.num_left == 1

    def chunk_tokens(self, request: Request, room_tokens: int) -> int:
        if room_tokens >= request.num_left:
            return request.num_left
        rest = request.num_left - room_tokens
        return max(1, room_tokens - max(0, self.least_tokens - rest))

    def shared_tokens(self, request: Request, computed_tokens: int) -> int:
        return computed_tokens

    def matched_tokens(self, request: Request) -> int:
        return max(0, len(request.tokens) - self.least_tokens)

    def whole_tokens(self, num_tokens: int) -> int:
        return num_tokens


@dataclass(frozen=True)
class FixedPhases:
    """cell_tokens: where bits depend on a step's shape, a prompt's tokens [i * cell, (i + 1) * cell), or those that it
    has of these, are a step of their own, and prefixes are taken in whole cells; a multiple of a page. None: kernels
    give a row the same bits in any step of prompts.
    """

    cell_tokens: int | None = None
    one_decode: bool = False

    @property
    def one_chunk(self) -> bool:
        return self.cell_tokens is not None

    def decodes(self, request: Request) -> bool:
        return request.num_computed >= request.num_prompt

    def chunk_tokens(self, request: Request, room_tokens: int) -> int:
        left = request.num_prompt - request.num_computed
        return min(room_tokens if self.cell_tokens is None else self.cell_tokens, left)

    def shared_tokens(self, request: Request, computed_tokens: int) -> int:
        return self.whole_tokens(min(computed_tokens, request.num_prompt))

    def matched_tokens(self, request: Request) -> int:
        return self.whole_tokens(request.num_prompt - 1)

    def whole_tokens(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % (self.cell_tokens or 1)
