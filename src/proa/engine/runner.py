"""Runs planned steps on an executor: requests to spans, results by span to results by request. Never: scheduling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proa.engine.executors.batch import PromptLogprobs, Span, StepBatch, StepResult
from proa.engine.executors.clock import Stage
from proa.engine.executors.executor import Executor
from proa.engine.scheduling.request import NO_SLOT
from proa.engine.scheduling.step_plan import StepItem, StepPlan
from proa.types import TokenLogprob

POLL_S = 0.0005  # between looks at a decode step beside which a prompt is launched: the step's results wait for it


class StepOutput(msgspec.Struct):
    """Results by request id. A request with non-finite values is in `faults`, with the reason, and has no token.
    streamed: see StepResult."""

    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprob]] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    faults: dict[str, str] = {}
    replaced: list[str] = []  # requests that a step launched ahead continues with another token
    streamed: float | None = None


@dataclass(eq=False)
class Flight:
    """A plan that was launched. counted: indices of the items whose requests had not ended when it was sampled."""

    plan: StepPlan
    step: Any  # of the executor's type
    batch: StepBatch
    began_s: float
    step_is_whole: bool = True  # not computed in parts
    counted: frozenset[int] = field(default=frozenset())

    def age_s(self) -> float:
        """Seconds since it was launched."""
        return time.perf_counter() - self.began_s


class Runner:
    def __init__(self, executor: Executor[Any], *, overlap: bool = True) -> None:
        """overlap: launch a step before the results of the last one are taken, where the executor can."""
        self.executor, self._overlap = executor, overlap

    def run(self, plan: StepPlan) -> StepOutput:
        """A whole step."""
        flight = self.launch(plan)
        self.sample(flight, lambda item: True)
        return self.wait(flight)

    def launch(self, plan: StepPlan, after: Flight | None = None) -> Flight:
        """See Executor. after: the plan's items continue those that counted there."""
        began_s, batch = time.perf_counter(), step_batch(plan, follows=after is not None)
        step = self.executor.launch(batch, None if after is None else after.step)
        return Flight(plan, step, batch, began_s)

    def launch_in_parts(self, plan: StepPlan, share: float = 0.0) -> Flight:
        """See Executor."""
        began_s, batch = time.perf_counter(), step_batch(plan)
        return Flight(plan, self.executor.launch_in_parts(batch, share), batch, began_s, step_is_whole=False)

    def runs_beside(self, flight: Flight) -> bool:
        return self.executor.runs_beside(flight.step)

    def keep_ahead(self, flight: Flight) -> bool:
        return self.executor.keep_ahead(flight.step)

    def advance(self, flight: Flight, blocks: int) -> bool:
        return self.executor.advance(flight.step, blocks)

    def done_share(self, flight: Flight) -> float:
        return self.executor.done_share(flight.step)

    def cancel(self, flight: Flight) -> None:
        self.executor.cancel(flight.step)

    def can_follow(self, flight: Flight) -> bool:
        return self._overlap and self.executor.can_follow(flight.step)

    def sample(self, flight: Flight, counts: Callable[[StepItem], bool]) -> None:
        """Sample what the plan says, of the items that still count."""
        items = flight.plan.items
        flight.counted = frozenset(i for i, item in enumerate(items) if counts(item))
        spans = [i for i in flight.batch.sampled if i in flight.counted]
        self.executor.sample(flight.step, spans, [items[i].request.row for i in spans])
        self.executor.clock.lap(Stage.SAMPLE)

    def wait(self, flight: Flight, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        """meanwhile: called at least once, and every POLL_S until the step has ended."""
        while meanwhile is not None:
            meanwhile()
            if self.executor.ended(flight.step):
                break
            time.sleep(POLL_S)
        output = _output(flight, self.executor.wait(flight.step))
        self.executor.clock.lap(Stage.SAMPLE)
        return output


def step_batch(plan: StepPlan, *, follows: bool = False) -> StepBatch:
    """The plan as a batch. follows: the tokens are known only on the device; 0 stands in their place."""
    spans: list[Span] = []
    sampled: list[int] = []
    before: list[tuple[int, int]] = []
    behind: list[tuple[int, int]] = []
    prompts: list[PromptLogprobs] = []
    row = 0
    for i, item in enumerate(plan.items):
        request = item.request
        tokens: Sequence[int] = (0,) if follows else request.tokens[item.start : item.start + item.num_tokens]
        spans.append(Span(tokens, item.start, request.pages, request.num_prompt, request.state_slot))
        if item.samples:
            sampled.append(i)
        if item.copy_from != NO_SLOT:
            before.append((item.copy_from, request.state_slot))
        if item.copy_to != NO_SLOT:
            behind.append((request.state_slot, item.copy_to))
        if request.sampling.prompt_logprobs is not None and item.start < request.num_prompt:
            prompts += _prompt_logprobs(i, item, row, request.sampling.prompt_logprobs)
        row += item.num_tokens
    return StepBatch(spans, sampled, before, behind, prompts)


def _prompt_logprobs(span: int, item: StepItem, row: int, top: int) -> list[PromptLogprobs]:
    """The prompt tokens that this chunk's rows predict. Empty once tokens were generated: a preempted
    request computes its prompt again."""
    request = item.request
    if request.num_generated:
        return []
    last = min(item.start + item.num_tokens, request.num_prompt - 1)
    return [PromptLogprobs(span, row, request.tokens[item.start + 1 : last + 1], top)]


def _output(flight: Flight, result: StepResult) -> StepOutput:
    out, items = StepOutput(), flight.plan.items
    for i in flight.counted:
        name = items[i].request.id
        if why := result.faults.get(i) or items[i].request.row.fault:
            out.faults[name] = why
        elif (tokens := result.tokens.get(i)) is not None:
            out.tokens[name] = tokens
        if (logprobs := result.logprobs.get(i)) is not None:
            out.logprobs[name] = logprobs
        if (prompt_logprobs := result.prompt_logprobs.get(i)) is not None:
            out.prompt_logprobs[name] = prompt_logprobs
    out.replaced, out.streamed = [items[i].request.id for i in result.replaced], result.streamed
    return out
