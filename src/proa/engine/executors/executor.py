"""The interface of all executors: a step is launched, sampled and waited for. Never: requests, scheduling.

A launched step is a value of the executor's own type S; whatever belongs to that step alone is kept in it. The orders
in which the engine makes these calls are its schedules:

    one after the other      launch(a) sample(a) wait(a), launch(b) sample(b) wait(b)
    overlapped               launch(a) sample(a) launch(b, after=a) wait(a) sample(b) launch(c, after=b) wait(b) ...
    prefill in turns         launch_in_parts(p), then whole steps alternate with advance(p), sample(p) wait(p)
    prefill beside decode    launch_in_parts(p), then whole steps are computed while keep_ahead(p) is called between and
                             during them, sample(p) wait(p)
    one overtakes            launch_in_parts(p), advance(p), launch_in_parts(q), advance(q), sample(q) wait(q),
                             advance(p), sample(p) wait(p)

Steps are sampled in the order in which they were launched, a step in parts when it is done, and each only after the one
sampled before it was waited for: they share the buffers of logits and tokens. All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from proa.engine.executors.batch import Span, StepBatch, StepResult
from proa.engine.executors.clock import StepClock
from proa.models.spec import Model
from proa.native.doorbell import Counters
from proa.ops.caches import Caches
from proa.plan.budget import SCORED_ROWS
from proa.plan.cells import Cells
from proa.sampling.choose import SampledToken
from proa.sampling.rows import Row
from proa.types import TokenLogprob

# Steps up to this many tokens are bound by reading weights, longer ones by arithmetic, so each kind has its own
# number of threads.
FEW_TOKENS = 8

S = TypeVar("S")
P = TypeVar("P")


class Pace(NamedTuple):
    """Seconds of the last whole step beside a step in parts, and of one block of the step in parts that is advanced
    now, a mean over the last ones. 0: not known yet."""

    step_s: float
    block_s: float


class Executor(Protocol[S]):
    """`clock` gets a lap when a step's inputs are written, and when its results are there."""

    spec: Model
    clock: StepClock
    caches: Caches  # that its steps read and write

    def launch(self, batch: StepBatch, after: S | None = None) -> S:
        """Start to compute all rows of a step; K, V and states are written to their caches.

        after: the last launched step, sampled and not waited for. Span i of the batch then continues the i-th span
        sampled there: its one token is the one sampled, whatever `tokens` says. Only if can_follow(after). While a step
        in parts is unfinished all whole steps have one row per sequence.
        """

    def launch_in_parts(self, batch: StepBatch, share: float = 0.0) -> S:
        """Begin a step that `advance` or `keep_ahead` computes. At most two such steps at a time: the second one, with
        at most StepLimits.over_rows rows, overtakes the first, which is advanced when the second was sampled or
        cancelled.

        share: the fraction of the time that the step would get in turns with whole steps that run now, 0.0 if none do.
        By it the executor decides whether the step runs beside whole steps instead, because it is then done sooner.
        """

    def sample(self, step: S, spans: Sequence[int], rows: Sequence[Row]) -> None:
        """Sample the next tokens of these spans of the batch, in its order, a subset of its `sampled`. rows: one for
        each of batch.rows_of(spans). Must be called once for each step, also with no spans."""

    def wait(self, step: S) -> StepResult:
        """Wait until the step has been computed and sampled; its results."""

    def can_follow(self, step: S) -> bool:
        """Whether launch(..., after=step) is possible for this step, which was launched last and has been sampled."""

    def advance(self, step: S, blocks: int) -> bool:
        """Compute up to `blocks` more blocks of a step in parts: layers, each for one chunk of the step and, where its
        experts come in groups, one group. Returns whether all are computed."""

    def runs_beside(self, step: S) -> bool:
        """Whether a step in parts may be computed while the device and the CPU compute whole steps."""

    def keep_ahead(self, step: S) -> bool:
        """Launch some more of a step in parts, so that the device goes on with it for some 30 ms, while whole steps
        launched from now on do not wait for it. Returns whether all is computed. Only if runs_beside(step); `advance`
        may be used again later."""

    def ended(self, step: S) -> bool:
        """Whether a step that was sampled has been computed, so that `wait` does not block."""

    def done_share(self, step: S) -> float:
        """Fraction of a step in parts that has been launched, 0 to 1."""

    def cancel(self, step: S) -> None:
        """Discard a launched step: wait for the device if need be; its results are lost."""

    def pace(self) -> Pace:
        """Durations that decide how many blocks fit between two steps of decode."""

    def logits_of(self, step: S, rows: Sequence[int]) -> Tensor:
        """float32 [R, vocab]: logits of these rows of a step that was waited for, until another one is launched. For
        tests and checks; may recompute the head. Valid until the next call."""

    def kept(self, step: S) -> Mapping[int, Tensor]:
        """Outputs [T, hidden], by block, of the blocks that the executor was built to keep (for draft heads). Of a step
        that was waited for; valid until another one is launched."""

    def counters(self) -> Counters:
        """The CPU's work for a GPU so far."""


def step_result(
    batch: StepBatch, sampled: Sequence[int], choices: Sequence[SampledToken], faults: dict[int, str]
) -> StepResult:
    """Collect a step's results by span. choices: one for each of batch.rows_of(sampled). faults: spans whose hidden
    states are NaN or infinite, and why."""
    result, rows = StepResult(), iter(choices)
    for span in sampled:
        own = [next(rows) for _ in range(1 + batch.spans[span].num_drafts)]
        if own[0].token < 0:
            result.faults[span] = "The model's logits were not finite."
            continue
        _take(result, span, accepted(batch.spans[span], own))
    for span, why in faults.items():
        result.faults[span] = why
        result.tokens.pop(span, None)
    return result


def _take(result: StepResult, span: int, choices: Sequence[SampledToken]) -> None:
    result.tokens[span] = [choice.token for choice in choices]
    logprobs: list[TokenLogprob] = [choice.logprob for choice in choices if choice.logprob is not None]
    if logprobs:
        result.logprobs[span] = logprobs
    if any(choice.late for choice in choices):
        result.replaced.append(span)


def accepted(span: Span, choices: Sequence[SampledToken]) -> Sequence[SampledToken]:
    """The sampled tokens up to the first that differs from the draft at its place, that one included.

    Lossless: each row is sampled as it would be without drafts, and the rows after a rejected draft are discarded.
    """
    drafts = span.tokens[len(span.tokens) - span.num_drafts :]
    for count, (draft, choice) in enumerate(zip(drafts, choices, strict=False), 1):
        if draft != choice.token:
            return choices[:count]
    bad = next((i for i, choice in enumerate(choices) if choice.token < 0), len(choices))
    return choices[:bad]


def prompt_logprobs(
    batch: StepBatch, score: Callable[[Sequence[int], Sequence[int], int], list[TokenLogprob]],
    cells: Cells | None = None,
) -> dict[int, list[TokenLogprob]]:  # fmt: skip
    """Log-probabilities of prompt tokens, by span. score(rows, tokens, top): those of one token after each of up to
    SCORED_ROWS rows, which are never of two cells."""
    found: dict[int, list[TokenLogprob]] = {}
    for asked in batch.prompt_logprobs:
        scores = found.setdefault(asked.span, [])
        each = len(asked.tokens) if cells is None else cells.tokens
        for cell in range(0, len(asked.tokens), each or 1):
            for first in range(cell, min(cell + each, len(asked.tokens)), SCORED_ROWS):
                tokens = asked.tokens[first : min(first + SCORED_ROWS, cell + each)]
                begin = asked.first_row + first
                scores += score(range(begin, begin + len(tokens)), tokens, asked.top)
    return found


def unfinished(parts: P | None) -> P:
    """The parts of a step in parts. Raises ValueError for a step that was launched as a whole."""
    if parts is None:
        raise ValueError("only a step launched with launch_in_parts() can be advanced, but this one was launched whole")
    return parts
