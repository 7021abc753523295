"""Finds the sequences of a step that became NaN or infinite, and the layer where that began. Never: ending requests.

The device notes faults by row, for all steps since they were last read. With a step in flight after the one waited for,
a fault may belong to either: a sequence fails only when its own logits are non-finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from proa.engine.executors.batch import Span, StepBatch
from proa.engine.executors.device_queue import Cut
from proa.engine.executors.parts import Parts, non_finite_rows
from proa.engine.executors.session import Session
from proa.errors import NumericsError
from proa.hybrid.faults import Fault
from proa.models.spec import Model
from proa.native.doorbell import Counters
from proa.plan.cells import Cells

_SOMEWHERE = "The hidden states were not finite."


@dataclass(eq=False)
class WatchedStep:
    """A launched step whose rows are checked for non-finite values. rows: the sampled ones, in the order of `spans`.
    streamed: see StepResult.

    next_step: launched after it, before its tokens were read. followed: it is such a step itself, so only rows that
    still count are scored. doubtful: the step before it had a non-finite row, which may be computed here again. early:
    faults that were read with the step before it, by index of the span.

    parts: of a step in parts. overtakes: it was launched while another step in parts was unfinished. alone: the device
    computes it without the CPU, so that it may run beside whole steps; the session does not count its launches."""

    batch: StepBatch
    spans: Sequence[int] = ()
    rows: Sequence[int] = ()
    streamed: float | None = None
    next_step: WatchedStep | None = None
    followed: bool = False
    doubtful: bool = False
    early: dict[int, str] = field(default_factory=dict)
    parts: Parts | None = None
    overtakes: bool = False
    alone: bool = False


class WatchedSession:
    """A session that keeps NumericsErrors instead of raising them: `faults_of` finds the rows that they concern."""

    def __init__(self, session: Session, spec: Model) -> None:
        self._session = session
        self._blocks = list(spec.routed)
        self._cpu_error = ""
        self.num_launched = 0  # number of begin() calls
        self._num_ended = 0

    def begin(self) -> None:
        self._session.begin()
        self.num_launched += 1

    def launched(self) -> None:
        self._session.launched()

    @property
    def variant(self) -> int:
        return self._session.variant

    def begin_step(self, step: WatchedStep) -> None:
        """Note how the experts in RAM are computed in a whole step."""
        step.streamed = 0.0 if self._session.has_experts else None

    def begin_parts(
        self, step: WatchedStep, chunks: int, cells: Cells | None, beside: float | None
    ) -> Callable[[int], AbstractContextManager[None]]:
        """Begin a step in parts, as a pass unless it overtakes one or its cells are not streamed. Returns the context
        of launches, by the first row of a chunk. beside: see Session.begin_pass."""
        if step.overtakes:
            self.begin_step(step)
            return lambda first_row: nullcontext()
        first = step.batch.spans[0]
        if cells is not None and not cells.streams(first.start, first.num_prompt):  # all cells of a step are alike
            return self._session.in_parts
        self._session.begin_pass(step.batch.num_tokens, chunks, beside)
        step.alone = self._session.pass_is_alone
        return self._session.in_parts

    def decoding(self) -> AbstractContextManager[None]:
        return self._session.decoding()

    @property
    def pass_is_regular(self) -> bool:
        return self._session.pass_is_regular

    def cutting(self, cut: Cut) -> AbstractContextManager[None]:
        return self._session.cutting(cut)

    @property
    def pass_waits(self) -> bool:
        return self._session.pass_waits

    def pause_pass(self) -> None:
        self._session.pause_pass()

    def counters(self) -> Counters:
        return self._session.counters()

    @property
    def num_in_flight(self) -> int:
        return self.num_launched - self._num_ended

    def end_until(self, number: int) -> None:
        """The device has finished all of the first `number` launches. Raises every error but NumericsError."""
        while self._num_ended < number:
            self._num_ended += 1
            try:
                self._session.end()
            except NumericsError as error:
                self._cpu_error = error.message

    def step_faults(
        self, step: WatchedStep, bad: Collection[int], hidden: Sequence[Tensor], *, between_parts: bool
    ) -> dict[int, str]:  # fmt: skip
        """The faults of a finished step by index of the span. bad: sampled rows whose logits are not finite. hidden:
        the step's hidden states in pieces, of which its own rows are the first. between_parts: another step, in parts,
        is unfinished."""
        if step.parts is not None:
            return self.faults_in_parts(step, non_finite_rows(hidden, step.batch.num_tokens))
        if between_parts:
            return self.faults_between(step.batch.spans, bad)
        all_scored = step.followed or len(step.rows) == step.batch.num_tokens
        found = self.faults_of(step, bad, all_scored=all_scored)
        if not found or step.followed or step.next_step is not None:
            return found
        # Notes may be left of a request that had ended when a step launched ahead computed one more of its rows.
        ends = _ends(step.batch.spans)
        own = {_span_at(ends, row) for row in non_finite_rows(hidden, step.batch.num_tokens)}
        return {i: why for i, why in found.items() if i in own}

    def faults_of(self, step: WatchedStep, bad: Collection[int], *, all_scored: bool) -> dict[int, str]:
        """The faults of a finished whole step by index of the span. bad: rows whose logits are not finite. all_scored:
        every row that still counts was scored, so any NaN would have reached `bad`. Faults read here that are not of
        this step are left to the step after it, as `early`."""
        spans, following = step.batch.spans, step.next_step
        look = bool(bad) or step.doubtful or not all_scored
        found = self.read(spans, look=look) | step.early
        if following is not None:
            following.doubtful = bool(bad)
            if len(following.batch.spans) < len(spans):
                return {}  # rows have moved up: a fault's row number may be of either step
            following.early = {i: why for i, why in found.items() if i not in bad}
        elif not step.followed:
            return found
        return {i: why for i, why in found.items() if i in bad}

    def read(self, spans: Sequence[Span], *, look: bool) -> dict[int, str]:
        """Faults of all steps since the last call, by index of the span whose row they are at.

        look: read the device's notes even if the CPU raised no NumericsError. Its error without notes concerns all
        spans.
        """
        cpu_error, self._cpu_error = self._cpu_error, ""
        if not (cpu_error or look):
            return {}
        ends = _ends(spans)
        found: dict[int, str] = {}
        for fault in self._session.faults(ends[-1]):
            found.setdefault(_span_at(ends, fault.row), self._describe(fault))
        return found if found or not cpu_error else dict.fromkeys(range(len(spans)), cpu_error)

    def faults_between(self, spans: Sequence[Span], bad: Collection[int]) -> dict[int, str]:
        """Faults of a step computed while a step in parts is unfinished: notes may be of either, so only the `bad`
        rows, which are known to be non-finite, count."""
        if not bad:
            return {}
        ends = _ends(spans)
        reasons = {fault.row: self._describe(fault) for fault in self._session.faults(ends[-1])}
        found: dict[int, str] = {}
        for row in sorted(bad, key=lambda row: (row not in reasons, row)):
            found.setdefault(_span_at(ends, row), reasons.get(row, _SOMEWHERE))
        return found

    def faults_in_parts(self, step: WatchedStep, bad: Collection[int]) -> dict[int, str]:
        """Faults of a step in parts, all of which have ended. One that overtakes has its notes among those of whole
        steps."""
        self._cpu_error = ""
        with nullcontext() if step.overtakes else self._session.in_parts():
            return self.faults_between(step.batch.spans, bad)

    def end_parts(self, step: WatchedStep) -> None:
        """End a step in parts: all parts were launched, or it was cancelled and its launches have ended. Notes how the
        experts in RAM were computed in it."""
        if not step.overtakes:
            streamed = self._session.end_pass()
            step.streamed = streamed if self._session.has_experts else None

    def forget_parts(self, step: WatchedStep) -> None:
        """Discard the notes about a step in parts that was cancelled."""
        self.end_parts(step)
        self.faults_in_parts(step, range(step.batch.num_tokens))

    def _describe(self, fault: Fault) -> str:
        return f"NaN or infinity in layer {self._blocks[fault.layer]}, from {fault.source}."


def _ends(spans: Sequence[Span]) -> list[int]:
    """The row behind each span's last one."""
    return list(itertools.accumulate(len(span.tokens) for span in spans))


def _span_at(ends: Sequence[int], row: int) -> int:
    return next(i for i, end in enumerate(ends) if row < end)
