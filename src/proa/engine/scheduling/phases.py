"""The phase (prompt or decode) in which each token of a request is computed, and which tokens' pages may be shared.
Never: pages, the order of service.

With `--deterministic` a token's bits must not depend on the schedule (docs/decisions/040). So its position alone
decides its phase: prompt tokens are computed in prefill chunks and generated ones by decode, one per step, also when
they are recomputed after a preemption. Only pages of prompt tokens are shared: decode's kernels give other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from proa.engine.scheduling.request import Request

# The CPU's attention computes up to 4 rows of a sequence as in decode, which sums in another order (kDirectQueries in
# csrc/src/attention.cc). If the last chunk of a prompt has more rows, its bits do not depend on whether a prefix came
# from the cache.
LEAST_ROWS_ON_CPU = 5


class Phases(Protocol):
    @property
    def one_chunk(self) -> bool:
        """Whether a step has at most one prefill chunk."""

    @property
    def one_decode(self) -> bool:
        """Whether a decode step has only one request."""

    def decodes(self, request: Request) -> bool:
        """Whether the request's next step is decode: one token."""

    def chunk_tokens(self, request: Request, room_tokens: int) -> int:
        """Size in tokens of the request's next prefill chunk, in a step with room for `room_tokens`."""

    def shared_tokens(self, request: Request, computed_tokens: int) -> int:
        """Number of leading computed tokens whose full pages may be shared through the prefix cache."""

    def matched_tokens(self, request: Request) -> int:
        """The most tokens that the request may take from the prefix cache: its last prefill chunk is computed."""

    def whole_tokens(self, num_tokens: int) -> int:
        """Usable length, in tokens, of a cached prefix of `num_tokens`: whole cells where steps have cells."""


@dataclass(frozen=True)
class FreePhases:
    """The number of tokens left decides the phase: one is decode, more are prefill. The fastest kernels for each step.

    least_tokens: minimum size of a prompt's last chunk, unless the whole prompt is shorter.
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
    """A token's position decides its phase (--deterministic).

    cell_tokens: for kernels whose bits depend on a step's shape. The prompt tokens [i * cell, (i + 1) * cell), the last
    cell cut at the prompt's end, are one step without other tokens, and cached prefixes are used in whole cells. A
    multiple of the page size. None: kernels give a row the same bits in any prefill step.
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
