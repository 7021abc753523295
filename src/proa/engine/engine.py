"""The engine: plan a step, run it, commit it. Never: HTTP, processes, text."""

from __future__ import annotations

import logging
import time

import msgspec

from proa.engine.clock import Stage
from proa.engine.count_saver import CountSaver
from proa.engine.ipc import Stats
from proa.engine.lane import Lane
from proa.engine.runner import Runner, StepOutput
from proa.engine.scheduler import Scheduler
from proa.engine.step_plan import StepPlan
from proa.errors import RequestError
from proa.layers.rope import dynamic_lengths
from proa.native.doorbell import NOTHING_COUNTED, Counters
from proa.native.pool import Pool
from proa.types import EngineRequest, TokenEvent, TokenLogprob

log = logging.getLogger(__name__)


class Engine:
    """Owns scheduler and runner; everything happens in submit, abort and step, called from one thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        vocab: int,
        saver: CountSaver | None = None,
        lane: Lane | None = None,
        helpers: Pool | None = None,
    ) -> None:
        """saver: of what steps choose. lane: for what the scheduler plans beside others, if it does. helpers: workers
        that have nothing to do between steps."""
        self._saver, self._lane, self.helpers = saver, lane, helpers
        self.runner = runner
        self.scheduler = scheduler
        self.vocab = vocab
        self.clock = runner.executor.clock
        self._dynamic_from = min(dynamic_lengths(runner.ropes), default=None)
        self._ahead: StepPlan | None = None  # what the device computes already
        self._started_s = 0.0  # when the last step began that was not started ahead
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}  # until the first token takes them along

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence. Raises RequestError for ids outside the vocabulary, and whatever the scheduler refuses."""
        named = (*request.tokens, *request.sampling.logit_bias, *request.sampling.stop_token_ids)
        if outside := [t for t in named if not 0 <= t < self.vocab]:
            raise RequestError(
                f"Token id {outside[0]} is outside the model's vocabulary.", f"Use 0 to {self.vocab - 1}."
            )
        ends = (*request.sampling.eos_token_ids, *request.sampling.stop_token_ids)
        if request.sampling.min_tokens and len(set(ends)) >= self.vocab:
            raise RequestError("min_tokens forbids every token, for all of them end the answer.", "Name fewer of them.")
        if self._dynamic_from is not None and len(request.tokens) > self._dynamic_from:
            # Keys of such a prompt depend on its length: see docs/decisions/003.
            request = msgspec.structs.replace(request, salt=f"rope:{len(request.tokens)}:{request.salt}")
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> bool:
        self._prompt_logprobs.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Advance every scheduled sequence once; what happened, for the frontend.

        Where the device can go on by itself, the next step is started before this one's results are waited for.
        """
        plan = self._ahead or self._done_beside() or self._start() or self._done_beside()
        if plan is None:
            return []
        wanted = {item.request.id for item in plan.items if self.scheduler.counts(item)}
        self.runner.ask(plan, wanted)
        if self._lane is not None:
            self._lane.turn()
        self._ahead = self._start_ahead()
        output = self.runner.finish(plan, wanted)
        if self._lane is not None and plan is not self.scheduler.beside:
            self._lane.learn(plan, time.perf_counter() - self._started_s)
        if output.prompt_logprobs:
            self._collect_prompt_logprobs(plan, output)
        broken = [self._break(*why) for why in sorted(output.broken.items())] if output.broken else []
        events = self.scheduler.commit(plan, output.tokens, output.replaced)
        if output.logprobs or self._prompt_logprobs:
            events = [self._with_logprobs(event, output) for event in events]
        if self._saver is not None:
            self._saver.between_steps()
        self.clock.lap(Stage.SCHEDULE)
        return broken + events

    def _done_beside(self) -> StepPlan | None:
        """What the lane has done."""
        return None if self._lane is None else self._lane.take()

    def _start(self) -> StepPlan | None:
        self._drop_beside()
        self._started_s = time.perf_counter()
        plan = self.scheduler.plan(None if self._lane is None else self._lane.most_tokens)
        beside = self.scheduler.beside
        self.clock.lap(Stage.SCHEDULE)
        if self._lane is not None:
            self._lane.begin(beside)
            if plan is None:
                self._lane.finish()
        if plan is not None:
            self.runner.start(plan)
        return plan

    def _drop_beside(self) -> None:
        """Where nobody wants any more what the lane has."""
        plan = self.scheduler.beside
        if plan is not None and self._lane is not None and not any(map(self.scheduler.counts, plan.items)):
            self._lane.drop()
            self.scheduler.commit(plan, {})

    def _start_ahead(self) -> StepPlan | None:
        """The device is busy: what this takes adds nothing to the step."""
        plan = self.scheduler.plan_ahead() if self.runner.can_start_ahead else None
        if plan is not None:
            self.runner.start_ahead(plan)
        self.clock.hidden = plan is not None
        return plan

    def settle(self) -> None:
        """No step follows: wait for what the device still computes."""
        if self._lane is not None:
            self._lane.drop()
        if self._ahead is not None or self._lane is not None:
            self.runner.settle()
        if self._saver is not None:
            self._saver.end()

    def stats(self) -> Stats:
        done = self.runner.executor.counters()
        counted = () if done is NOTHING_COUNTED else _in_order_of_stats(done)
        return self.scheduler.stats(*self.clock.seconds(), *counted)

    def _with_logprobs(self, event: TokenEvent, output: StepOutput) -> TokenEvent:
        logprob = output.logprobs.get(event.id)
        prompt_logprobs = self._prompt_logprobs.pop(event.id, None)
        if logprob is None and prompt_logprobs is None:
            return event
        own = [logprob][: len(event.tokens)] if logprob is not None else None
        return msgspec.structs.replace(event, logprobs=own, prompt_logprobs=prompt_logprobs)

    def _break(self, request_id: str, why: str) -> TokenEvent:
        """Values were NaN or infinite: end that request, never a made-up token."""
        log.error("Request %s: %s", request_id, why)
        self.abort(request_id)
        return TokenEvent(id=request_id, finish="error", error=why)

    def _collect_prompt_logprobs(self, plan: StepPlan, output: StepOutput) -> None:
        for item in plan.items:
            if item.request.id in output.prompt_logprobs:
                if item.start == 0:  # the first token has nothing before it; a preempted prompt starts over
                    self._prompt_logprobs[item.request.id] = [None]
                self._prompt_logprobs[item.request.id] += output.prompt_logprobs[item.request.id]


def _in_order_of_stats(done: Counters) -> tuple[float, ...]:
    return (
        done.jobs,
        done.weight_bytes,
        done.experts,
        done.foreseen,
        done.moe_s,
        done.waiting_s,
        done.gaps,
        done.gap_s,
        done.looks,
        done.choices,
        done.hits,
        done.hit_bytes,
        done.missed_bytes,
        done.moved_bytes,
    )
