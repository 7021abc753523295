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
from proa.plan.cells import Cells

# The CPU's attention computes up to 4 rows of a sequence as in decode, which sums in another order (kDirectQueries in
# csrc/src/attention.cc). If the last chunk of a prompt has more rows, its bits do not depend on whether a prefix came
# from the cache.
LEAST_ROWS_ON_CPU = 5


@dataclass(frozen=True)
class NextChunk:
    """A request's next prefill chunk. padding_tokens: taken from the step's room besides. alone: its step has no other
    chunk."""

    num_tokens: int
    padding_tokens: int = 0
    alone: bool = False


class Phases(Protocol):
    @property
    def least_tokens(self) -> int:
        """Minimum size of a prompt's last chunk, so a prompt takes at most all tokens before these from the prefix
        cache."""

    @property
    def in_cells(self) -> bool:
        """Whether prompts are computed in cells."""

    @property
    def cell_tokens(self) -> int:
        """Tokens of a whole cell, all of which the bits of each may depend on; 1 without cells."""

    @property
    def one_decode(self) -> bool:
        """Whether a decode step has only one request."""

    def decodes(self, request: Request) -> bool:
        """Whether the request's next step is decode: one token."""

    def chunk(self, request: Request, room_tokens: int) -> NextChunk:
        """The request's next prefill chunk, in a step with room for `room_tokens`."""

    def suits(
        self, request: Request, start: int, room_tokens: int, *, beside_chunks: bool, overtakes: bool
    ) -> bool:  # fmt: skip
        """Whether the request's next chunk, from token `start` on, may be in a step with this room. beside_chunks: the
        step has chunks that need not be alone; overtakes: it overtakes another step of prompts."""

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
    in_cells: ClassVar[bool] = False
    cell_tokens: ClassVar[int] = 1
    one_decode: ClassVar[bool] = False

    def decodes(self, request: Request) -> bool:
        return request.num_left == 1

    def chunk(self, request: Request, room_tokens: int) -> NextChunk:
        rest = max(0, request.num_left - room_tokens)
        short = max(0, self.least_tokens - rest) if rest else 0
        return NextChunk(max(1, request.num_left - rest - short))

    def suits(
        self, request: Request, start: int, room_tokens: int, *, beside_chunks: bool, overtakes: bool
    ) -> bool:  # fmt: skip
        return True

    def shared_tokens(self, request: Request, computed_tokens: int) -> int:
        return computed_tokens

    def matched_tokens(self, request: Request) -> int:
        return max(0, len(request.tokens) - self.least_tokens)

    def whole_tokens(self, num_tokens: int) -> int:
        return num_tokens


@dataclass(frozen=True)
class FixedPhases:
    """A token's position decides its phase (--deterministic).

    cells: for kernels whose bits depend on a step's shape. Each cell of a prompt is computed by itself, and cached
    prefixes are used in whole cells, which are multiples of the page size. A step has either one cell that the CPU's
    experts compute, or any number of streamed ones, of one prompt or several: these share the copies of experts, and
    nothing that is computed. None: kernels give a row the same bits in any prefill step.

    keeps_states: recurrent states are copied after a step, so one ends with a prompt's last whole cell.
    """

    cells: Cells | None = None
    one_decode: bool = False
    keeps_states: bool = False
    least_tokens: ClassVar[int] = 1

    @property
    def in_cells(self) -> bool:
        return self.cells is not None

    @property
    def cell_tokens(self) -> int:
        return 1 if self.cells is None else self.cells.tokens

    def decodes(self, request: Request) -> bool:
        return request.num_computed >= request.num_prompt

    def chunk(self, request: Request, room_tokens: int) -> NextChunk:
        start, end, cells = request.num_computed, request.num_prompt, self.cells
        if cells is None:
            return NextChunk(min(room_tokens, end - start))
        if not cells.streams(start, end):
            return NextChunk(cells.size(start, end), alone=True)
        most = max(1, room_tokens // cells.tokens)
        num_tokens, count = cells.streamed_tokens(start, end, most, whole=self.keeps_states)
        return NextChunk(num_tokens, count * cells.tokens - num_tokens)

    def suits(
        self, request: Request, start: int, room_tokens: int, *, beside_chunks: bool, overtakes: bool
    ) -> bool:  # fmt: skip
        if self.cells is None:
            return True
        streams = self.cells.streams(start, request.num_prompt)
        if beside_chunks:
            return streams and room_tokens >= self.cells.tokens
        return not (streams and overtakes)

    def shared_tokens(self, request: Request, computed_tokens: int) -> int:
        return self.whole_tokens(min(computed_tokens, request.num_prompt))

    def matched_tokens(self, request: Request) -> int:
        return self.whole_tokens(request.num_prompt - 1)

    def whole_tokens(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.cell_tokens
