"""Planned steps on an executor: tokens in, tokens out. Belongs here: forward pass and sampling. Never: scheduling."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from proa.engine.clock import Stage
from proa.engine.executor import Executor, Follower, InParts
from proa.engine.request import NO_SLOT, Request
from proa.engine.spans import Span
from proa.engine.step_plan import StepItem, StepPlan
from proa.plan.budget import SCORED_ROWS
from proa.sampling.rows import Row
from proa.types import TokenLogprob


class StepOutput(msgspec.Struct):
    """By request id. A request whose values were not finite is in `broken`, with the reason, and has no token."""

    tokens: dict[str, int] = {}
    logprobs: dict[str, TokenLogprob] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    broken: dict[str, str] = {}
    replaced: list[str] = []  # a step that was started ahead goes on with another token than theirs


class Runner:
    """Steps of the scheduler, on an executor: start, ask and finish each."""

    def __init__(
        self, executor: Executor, page_tokens: int, follower: Follower | None = None, in_parts: InParts | None = None
    ) -> None:
        """follower: the executor, if it can start a step while the last one's tokens are not known yet; in_parts: if it
        can compute one step between others."""
        self.executor, self._follower, self._parted = executor, follower, in_parts
        self.page_tokens = page_tokens
        self.ropes = executor.spec.ropes
        self._asked: list[Request] = []

    def run(self, plan: StepPlan) -> StepOutput:
        """A whole step."""
        everyone = {item.request.id for item in plan.items}
        self.start(plan)
        self.ask(plan, everyone)
        return self.finish(plan, everyone)

    def start(self, plan: StepPlan) -> None:
        """Compute every item's rows, write their KV; states of others are taken before, copies behind."""
        spans: list[Span] = []
        scored: list[int] = []
        end = 0
        for item in plan.items:
            spans.append(_span(item))
            end += item.num_tokens
            if item.samples:
                scored.append(end - 1)
        self._copy_before(plan)
        self.executor.forward(spans, scored)
        self._copy_behind(plan)

    def begin(self, plan: StepPlan) -> None:
        """The same a part at a time, between other steps: the executor advances, then `end`, then `ask`."""
        self._copy_before(plan)
        self.in_parts.begin([_span(item) for item in plan.items])

    def end(self, plan: StepPlan) -> None:
        self.in_parts.end()
        self._copy_behind(plan)

    @property
    def in_parts(self) -> InParts:
        """The executor, which raises ValueError if it is none."""
        if self._parted is None:
            raise ValueError("this executor computes steps as a whole")
        return self._parted

    @property
    def can_start_ahead(self) -> bool:
        return self._follower is not None and self._follower.can_follow()

    def start_ahead(self, plan: StepPlan) -> None:
        """The same of a plan ahead of the step that was asked last, whose tokens only the device knows."""
        if self._follower is None:
            raise ValueError("this executor does not go on by itself")
        self._follower.follow([msgspec.structs.replace(_span(item), tokens=(0,)) for item in plan.items])
        self._copy_behind(plan)

    def ask(self, plan: StepPlan, wanted: Collection[str]) -> None:
        """Choose tokens where the plan says so, of the requests that want them."""
        asked: list[Row] = []
        rows: list[int] = []
        self._asked = []
        end = 0
        for item in plan.items:
            request = item.request
            end += item.num_tokens
            if item.samples and request.id in wanted:
                self._asked.append(request)
                asked.append(request.row)
                rows.append(end - 1)
        if asked or self._follower:
            self.executor.sample(rows, asked)
        self.executor.clock.lap(Stage.SAMPLE)

    def finish(self, plan: StepPlan, wanted: Collection[str]) -> StepOutput:
        """Wait for what was asked."""
        out = StepOutput()
        if self._asked or self._follower:
            self._take(out)
        for place, why in self.executor.broken().items():
            request_id = plan.items[place].request.id
            if request_id in wanted:
                out.broken[request_id] = why
                out.tokens.pop(request_id, None)
        end = 0
        for item in plan.items:
            end += item.num_tokens
            request = item.request
            if request.sampling.prompt_logprobs is None or request.num_generated or request.id not in wanted:
                continue
            self._score_prompt(item, end - item.num_tokens, out)
        self.executor.clock.lap(Stage.SAMPLE)
        return out

    def settle(self) -> None:
        """Wait for a step that was started ahead, and forget it."""
        if self._follower is not None:
            self._follower.sample((), ())
            self._follower.choices()

    def _copy_before(self, plan: StepPlan) -> None:
        self._copy([(item.copy_from, item.request.state_slot) for item in plan.items if item.copy_from != NO_SLOT])

    def _copy_behind(self, plan: StepPlan) -> None:
        self._copy([(item.request.state_slot, item.copy_to) for item in plan.items if item.copy_to != NO_SLOT])

    def _copy(self, slots: Sequence[tuple[int, int]]) -> None:
        if slots:
            self.executor.copy_states(slots)

    def _take(self, out: StepOutput) -> None:
        for request, choice in zip(self._asked, self.executor.choices(), strict=True):
            if choice.token < 0:
                out.broken[request.id] = "The model's logits were not finite."
                continue
            out.tokens[request.id] = choice.token
            if choice.logprob is not None:
                out.logprobs[request.id] = choice.logprob
            if choice.late:
                out.replaced.append(request.id)

    def _score_prompt(self, item: StepItem, row: int, out: StepOutput) -> None:
        """Log-probabilities of the prompt tokens that this chunk's rows, from `row` on, predict."""
        request, top = item.request, item.request.sampling.prompt_logprobs or 0
        last = min(item.start + item.num_tokens, request.num_prompt - 1)
        scored = out.prompt_logprobs.setdefault(request.id, [])
        for first in range(item.start, last, SCORED_ROWS):
            begin, end = first - item.start + row, min(first + SCORED_ROWS, last) - item.start + row
            tokens = request.tokens[first + 1 : first + 1 + end - begin]
            scored += self.executor.explain(range(begin, end), tokens, top)


def _span(item: StepItem) -> Span:
    request = item.request
    return Span(
        request.tokens[item.start : item.start + item.num_tokens],
        item.start,
        request.pages,
        request.num_prompt,
        request.state_slot,
    )
