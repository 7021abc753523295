"""The engine: plan a step, run it, commit it. Never: HTTP, processes, text."""

from __future__ import annotations

import logging

import msgspec

from proa.engine.count_saver import CountSaver
from proa.engine.executors.clock import Stage
from proa.engine.executors.page_tiers import PageTiers
from proa.engine.gaps import DecodeGaps
from proa.engine.runner import Flight, Runner, StepOutput
from proa.engine.scheduling.request import State
from proa.engine.scheduling.scheduler import Scheduler
from proa.engine.scheduling.step_plan import StepPlan
from proa.engine.stats import Stats, StepSeconds, of_experts
from proa.engine.turns import NoTurns, PrefillTurns
from proa.errors import RequestError
from proa.grammar.matcher import Follower
from proa.layers.rope import dynamic_lengths
from proa.native.doorbell import NOTHING_COUNTED
from proa.native.pool import Pool
from proa.types import EngineRequest, Progress, TokenEvent, TokenLogprob

log = logging.getLogger(__name__)


class Engine:
    """Owns scheduler and runner. All work is done in submit, abort and step, called from one thread."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, vocab: int, saver: CountSaver | None = None,
        turns: PrefillTurns | NoTurns | None = None, helpers: Pool | None = None, tiers: PageTiers | None = None,
    ) -> None:  # fmt: skip
        """saver: writes expert counts between steps. turns: computes prefill steps between decode steps. helpers:
        pool whose workers are idle between steps and may send messages. tiers: those of the scheduler."""
        self._tiers = tiers
        self._saver, self._turns, self.helpers = saver, turns or NoTurns(), helpers
        self._gaps = DecodeGaps()
        self.runner = runner
        self.scheduler = scheduler
        self.vocab = vocab
        self.clock = runner.executor.clock
        self._dynamic_from = min(dynamic_lengths(runner.executor.spec.ropes), default=None)
        self.stalls = False  # the last step could not be planned before KV pages are copied or given back
        self._ahead: Flight | None = None  # launched before the results of the step before were taken
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}  # sent with the request's first token

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_idle_work(self) -> bool:
        """Whether keep_up() should be called every second or so while there is no work."""
        return self.scheduler.room.lent.due_later

    def keep_up(self) -> bool:
        """Go on with copies of KV pages and with lent pages since the last step. Returns whether more is under way,
        so that it should be called again soon. For use while there is no work, or no step that could be launched."""
        self.scheduler.collect()
        return self.scheduler.stalls

    def submit(self, request: EngineRequest, matcher: Follower | None = None) -> None:
        """Queue a sequence. matcher: of its constraint or budget, if it has one. Raises RequestError for ids outside
        the vocabulary, and what Scheduler.submit raises."""
        named = (*request.tokens, *request.sampling.logit_bias, *request.sampling.stop_token_ids)
        if outside := [t for t in named if not 0 <= t < self.vocab]:
            raise RequestError(
                f"Token id {outside[0]} is outside the model's vocabulary.", f"Use 0 to {self.vocab - 1}."
            )
        ends = (*request.sampling.eos_token_ids, *request.sampling.stop_token_ids)
        if request.sampling.min_tokens and len(set(ends)) >= self.vocab:
            raise RequestError(
                "min_tokens forbids every token: all tokens are eos or stop tokens.", "Name fewer stop tokens."
            )
        if request.sampling.constraint is not None and not ends:
            raise RequestError(
                "The answer could not end: the model has no end-of-text token.",
                "Send stop_token_ids with the constraint.",
                param="stop_token_ids",
            )
        if self._dynamic_from is not None:
            # Keys of a longer prompt depend on its length: see docs/decisions/003. Shorter ones get 0, so that no salt
            # of a client is taken for a length.
            length = len(request.tokens) if len(request.tokens) > self._dynamic_from else 0
            request = msgspec.structs.replace(request, salt=f"rope:{length}:{request.salt}")
        self.scheduler.submit(request, matcher)

    def abort(self, request_id: str) -> bool:
        self._prompt_logprobs.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Take the results of the oldest step in flight, or of a new one, and return its events; none if all requests
        wait for pages that are restored or given back. Before the results are taken, the next step is launched if the
        executor can continue without the sampled tokens on the host."""
        flight = self._oldest()
        self.stalls = flight is None and self.scheduler.stalls
        if flight is None:
            return self._progress_beside()
        self.runner.sample(flight, self.scheduler.counts)
        if flight.step_is_whole:  # else its hidden states, which wait() may score, would be overwritten
            self._turns.prefill()
        self._ahead = self._launch_ahead(flight)
        output = self.runner.wait(flight, self._turns.meanwhile if flight.step_is_whole else None)
        if self._tiers is not None:
            prompts = (item.num_tokens for item in flight.plan.items if item.num_tokens > 1)
            self._tiers.learn(sum(prompts), flight.age_s())
        self._gaps.note(flight.plan, beside=self._turns.busy, limit_s=self._turns.limit_s)
        events = self._progress_beside() + self._commit(flight.plan, output)
        if all(item.request.state is State.FINISHED for item in flight.plan.items):
            self._turns.rest()  # every request that decodes is in each decode step
        return events

    def _oldest(self) -> Flight | None:
        """The step to be sampled next: launched ahead, computed in turns, or planned now."""
        flight = self._ahead or self._turns.take()
        if flight is not None:
            return flight
        if (plan := self._plan()) is not None:
            return self.runner.launch(plan)
        self._turns.finish()
        return self._turns.take()

    def _plan(self) -> StepPlan | None:
        """Plan the next step. A new step beside it is launched first, so that its states are copied before
        other steps write them."""
        scheduler = self.scheduler
        for step in (scheduler.beside, scheduler.over):
            if step is None or all(map(scheduler.counts, step.items)):
                continue
            if self._turns.should_give_up(step, scheduler.tokens_again(step)):
                self._turns.cancel(step)
                scheduler.give_up(step)
        plan = scheduler.plan(self._turns.most_tokens, self._turns.short_tokens())
        self.clock.lap(Stage.SCHEDULE)
        self._turns.launch(scheduler.beside, scheduler.over)
        return plan

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step after `flight` before its tokens reach the host. The device is busy then, so this host time
        is hidden."""
        plan = self.scheduler.plan_ahead() if self.runner.can_follow(flight) else None
        ahead = None if plan is None else self.runner.launch(plan, after=flight)
        self.clock.hidden = ahead is not None
        return ahead

    def _commit(self, plan: StepPlan, output: StepOutput) -> list[TokenEvent]:
        if output.prompt_logprobs:
            self._collect_prompt_logprobs(plan, output)
        if output.streamed is not None:
            _count_experts(plan, output.streamed)
        failed = [self._fail(*fault) for fault in sorted(output.faults.items())] if output.faults else []
        failed += self._progress(plan)
        events = self.scheduler.commit(plan, output.tokens, output.replaced)
        if output.logprobs or self._prompt_logprobs:
            events = [self._with_logprobs(event, output) for event in events]
        if self._saver is not None:
            self._saver.between_steps()
        self.clock.lap(Stage.SCHEDULE)
        return failed + events

    def settle(self) -> None:
        """Discard the steps in flight and write the final expert counts; no step may follow."""
        self._turns.cancel()
        if self._ahead is not None:
            self.runner.cancel(self._ahead)
            self._ahead = None
        if self._saver is not None:
            self._saver.end()
        if self._tiers is not None:
            self._tiers.close()

    def stats(self) -> Stats:
        scheduler, seconds = self.scheduler.stats(), StepSeconds(*self.clock.seconds())
        done = self.runner.executor.counters()
        stats = Stats(scheduler, seconds) if done is NOTHING_COUNTED else Stats(scheduler, seconds, *of_experts(done))
        stats = msgspec.structs.replace(stats, gaps=self._gaps.stats(self._turns.given_up))
        if (tiers := self._tiers) is None:
            return stats
        return msgspec.structs.replace(stats, prefix_files=tiers.file_stats(), prefix_ram=tiers.ram_stats())

    def _with_logprobs(self, event: TokenEvent, output: StepOutput) -> TokenEvent:
        logprobs = output.logprobs.get(event.id)
        prompt_logprobs = self._prompt_logprobs.pop(event.id, None)
        if logprobs is None and prompt_logprobs is None:
            return event
        own = logprobs[: len(event.tokens)] if logprobs is not None else None
        return msgspec.structs.replace(event, logprobs=own, prompt_logprobs=prompt_logprobs)

    def _progress(self, plan: StepPlan, share: float = 1.0) -> list[TokenEvent]:
        """Report the prefill chunks of requests that asked for it. share: the fraction of the step that is computed."""
        return [
            TokenEvent(id=r.id, progress=Progress(item.start + int(item.num_tokens * share), r.num_cached or 0))
            for item in plan.items
            if (r := item.request).sampling.return_progress
            and self.scheduler.counts(item)
            and not (item.samples and share == 1.0)
        ]

    def _progress_beside(self) -> list[TokenEvent]:
        """Report the prompts of steps that are computed in turns, and not complete."""
        return [event for plan, share in self._turns.progress() for event in self._progress(plan, share)]

    def _fail(self, request_id: str, why: str) -> TokenEvent:
        """End a request whose values were NaN or infinite with an error event and no token."""
        log.error("Request %s: %s", request_id, why)
        self.abort(request_id)
        return TokenEvent(id=request_id, finish="error", error=why)

    def _collect_prompt_logprobs(self, plan: StepPlan, output: StepOutput) -> None:
        for item in plan.items:
            if item.request.id in output.prompt_logprobs:
                if item.start == 0:  # the first token has no logprob; a preempted prompt starts over
                    self._prompt_logprobs[item.request.id] = [None]
                self._prompt_logprobs[item.request.id] += output.prompt_logprobs[item.request.id]


def _count_experts(plan: StepPlan, streamed: float) -> None:
    """Count where the experts in RAM were computed for the prompt tokens of a step; streamed: see StepResult."""
    for item in plan.items:
        if (tokens := min(item.num_tokens, item.request.num_prompt - item.start)) > 0:
            item.request.count_experts(tokens, streamed)
