"""A step as a value: what an executor computes, and what it returns. Never: requests, devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from proa.machine.cost.turns import DECODING_TOKENS, FAR_TOKENS
from proa.ops.sizes import buckets, deterministic_buckets, prompt_rows
from proa.plan.budget import SCORED_ROWS
from proa.plan.cells import Cells
from proa.plan.plan import Plan
from proa.types import TokenLogprob


class Span(msgspec.Struct, frozen=True):
    """One sequence's part of a step: `tokens` at positions `start`, `start` + 1, ...

    `pages` hold the KV of all positions up to the last one, slot `state` the sequence's recurrent states. The list of
    pages may be that of an earlier step, grown: its first entries never change. The last `num_drafts` tokens are
    drafts, which the sampled tokens accept or reject.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    num_prompt: int
    state: int = 0
    num_drafts: int = 0

    @property
    def in_prompt(self) -> bool:
        """Whether its first token is one of the prompt, not a generated one."""
        return self.start < self.num_prompt


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities to compute: tokens[i], as predicted by row `first_row` + i of the step, and the `top` most
    likely tokens there. `span`: index of the sequence in the batch."""

    span: int
    first_row: int
    tokens: Sequence[int]
    top: int


class StepBatch(msgspec.Struct, frozen=True):
    """One step. Serialisable: with msgspec it can be sent to other processes as it is.

    sampled: indices of the spans whose next tokens are sampled. Rows count through all spans: span 0 has the first
    ones. copies_before, copies_after: pairs (from, to) of recurrent-state slots, copied in this order before the first
    and after the last layer.
    """

    spans: Sequence[Span]
    sampled: Sequence[int] = ()
    copies_before: Sequence[tuple[int, int]] = ()
    copies_after: Sequence[tuple[int, int]] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()

    @property
    def rows_each(self) -> int:
        """Rows per sequence if each has the token that was generated last, with equally many drafts; else 0."""
        rows = 1 + self.spans[0].num_drafts if self.spans else 0
        return rows if all(len(s.tokens) == rows == 1 + s.num_drafts for s in self.spans) else 0

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    def rows_of(self, sampled: Sequence[int]) -> list[int]:
        """The rows that predict the next tokens of these spans: each one's last row, and one more for every draft."""
        ends = 0
        rows: list[int] = []
        wanted = set(sampled)
        for i, span in enumerate(self.spans):
            ends += len(span.tokens)
            if i in wanted:
                rows += range(ends - 1 - span.num_drafts, ends)
        return rows


class StepResult(msgspec.Struct):
    """Results by index of the span in the batch.

    tokens: 1 to 1 + num_drafts tokens of each span that was sampled. faults: why a span's values are NaN or infinite;
    such a span has no tokens. replaced: spans whose token was sampled on the CPU after the device had continued with
    another one. streamed: fraction of the experts in RAM that were copied to the GPU for this step, while the CPU
    computed the others; None if there is no GPU, or no expert in RAM.
    """

    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    faults: dict[int, str] = {}
    replaced: list[int] = []
    streamed: float | None = None


CHUNK_ROWS = 16  # chunks start at multiples: kernels are compiled for addresses that are multiples of 16


def chunks_of(spans: Sequence[Span], most_rows: int, cells: Cells | None = None) -> list[list[Span]]:
    """The spans, cut into chunks of at most `most_rows` rows, about equally long, in the order of their rows. cells: of
    prompts; each is then a chunk of its own."""
    if cells is not None:
        return [[_part(span, first, count)] for span in spans for first, count in _cells_in(span, cells)]
    rows = sum(len(span.tokens) for span in spans)
    each = -(-rows // -(-rows // most_rows))
    each = min(most_rows, -(-each // CHUNK_ROWS) * CHUNK_ROWS)
    chunks: list[list[Span]] = [[]]
    left = each
    for span in spans:
        first = 0
        while first < len(span.tokens):
            if not left:
                chunks.append([])
                left = each
            count = min(left, len(span.tokens) - first)
            chunks[-1].append(_part(span, first, count))
            first, left = first + count, left - count
    return chunks


def _cells_in(span: Span, cells: Cells) -> Iterator[tuple[int, int]]:
    """The first row and the number of rows of each cell in a span of a prompt."""
    first = 0
    while first < len(span.tokens):
        yield first, cells.size(span.start + first, span.num_prompt)
        first += cells.tokens


def _part(span: Span, first: int, count: int) -> Span:
    """The span with `count` of its tokens, from number `first` on."""
    if count == len(span.tokens):
        return span
    return msgspec.structs.replace(span, tokens=span.tokens[first : first + count], start=span.start + first)


@dataclass(frozen=True)
class StepLimits:
    """The largest step that an executor allocates buffers for. rows: computed at once; pass_rows: of a step in parts,
    which is computed in chunks of `rows`, or of fewer while others decode; over_rows: of a step in parts that
    overtakes another one, 0: none does. prompt_rows: sizes, rising, of whole steps with prompts that a GPU has graphs
    for; block_rows: of steps in parts whose blocks have graphs. cells: the chunks of steps in parts, of at most `rows`
    rows; None: they have any size up to that."""

    rows: int
    sequences: int
    context_tokens: int
    page_tokens: int
    head_rows: int
    pass_rows: int = 0
    over_rows: int = 0
    prompt_rows: tuple[int, ...] = ()
    block_rows: tuple[int, ...] = ()
    cells: Cells | None = None

    @property
    def rows_in_parts(self) -> int:
        """Most rows of a step in parts."""
        return max(self.rows, self.pass_rows)

    @property
    def chunks(self) -> int:
        """Most chunks of a step in parts."""
        if self.cells is not None and not self.pass_rows:
            return 1
        return -(-self.rows_in_parts // self.short_rows)

    @property
    def chunk_rows(self) -> int:
        """Most rows of a chunk of a step in parts."""
        return self.rows if self.cells is None else self.cells.tokens

    @property
    def short_rows(self) -> int:
        """Most rows of a chunk while others decode, or with more than FAR_TOKENS positions."""
        return min(self.chunk_rows, DECODING_TOKENS)

    def cut(self, spans: Sequence[Span], *, decoding: bool) -> list[list[Span]]:
        """The chunks of a step in parts with these spans. decoding: others decode when it begins."""
        far = any(span.start + len(span.tokens) > FAR_TOKENS for span in spans)
        return chunks_of(spans, self.short_rows if decoding or far else self.chunk_rows, self.cells)

    def decode_sizes(self, *, deterministic: bool) -> tuple[int, ...]:
        """Numbers of sequences that a decode step is padded to."""
        most = min(self.sequences, self.rows)
        return deterministic_buckets(most) if deterministic else buckets(most)


def positions_of(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """int64 [T] each: every row's position, and the sequence length that dynamic rotary angles are computed for."""
    positions = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in spans])
    prompts = torch.cat([torch.full((len(s.tokens),), s.num_prompt) for s in spans])
    return positions, torch.maximum(prompts, positions + 1)


def step_limits(plan: Plan) -> StepLimits:
    return StepLimits(
        rows=plan.max_batch_tokens,
        sequences=plan.max_running,
        context_tokens=plan.context_tokens,
        page_tokens=plan.page_tokens,
        head_rows=max(plan.max_running, SCORED_ROWS),
        pass_rows=plan.pass_tokens,
        over_rows=plan.over_tokens,
        prompt_rows=prompt_rows(plan.max_batch_tokens) if plan.gpu is not None and plan.gpu.prompt_graphs else (),
        block_rows=prompt_rows(plan.max_batch_tokens) if plan.gpu is not None and plan.gpu.block_graphs else (),
        cells=plan.cells,
    )
