"""Decides what the next step computes and in which pages its KV lies. Belongs here: intake, planning steps, pages,
preemption, committing results. Never: tensors, text, clocks, processes.

    submit -> WAITING -> plan() admits -> RUNNING -> commit() ... -> FINISHED
                 ^------- preempted -------'

A step is in flight from plan() to commit(). Meanwhile requests may be submitted and aborted, and no page or slot that
the step reads or writes gets another owner. Any number of steps may be in flight, each request in one of them, and they
are committed in any order, with two special cases. plan_ahead() gives the step after the one in flight before that
one's tokens are known (overlap scheduling); if a request ends in between, its row there is discarded. With turns
(engine/turns.py) plan() puts prefill chunks into `beside`, a step computed between decode steps, and while that one is
in flight short prompts into `over`, which is computed before the rest of `beside`. Rules, by importance:

1. The order of service is total: smaller priority, then earlier arrival. When pages run out, the last running request
   is preempted (its tokens stay; it waits at its old place and computes them again, mostly from the prefix cache). The
   first running request therefore always advances, and requests of equal priority are served in finite time. No page
   is taken from a request in flight: a request that needs one waits until that step is committed.
2. Each running decode gets its token first; prefill chunks share the rest of max_batch_tokens in that order, except
   that prompts which fit into half of it come before a chunk of one that does not fit into all of it.
3. A waiting request is admitted only with pages for all its tokens, plus one spare page for each request already
   running, so that it is not preempted at once. No request behind one that does not fit is admitted before it. A
   waiting request preempts running ones of worse priority for their slot or pages, never those of equal priority.
4. Siblings (same group) wait while one of them computes a prefix that they can then take from the prefix cache.

Every full page is offered to the prefix cache in the step that fills it. Pages there are shared and never written
again, hence only full pages are matched, and at least the last token of a prompt is always computed. For layers with
recurrent states, a step also says which of them are copied before and after it (engine/scheduling/copying.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from proa.cache.pages import PageAllocator
from proa.cache.radix import PrefixCache, PrefixMatch
from proa.engine.scheduling.copying import CopyRules, copying
from proa.engine.scheduling.integrity import check_lineups, check_pages, check_request, check_slots
from proa.engine.scheduling.lookup import PrefixLookup
from proa.engine.scheduling.phases import FreePhases, NextChunk, Phases
from proa.engine.scheduling.policy import Limits, Lineup, goes_on, refuse_crowd, refuse_impossible
from proa.engine.scheduling.request import NO_SLOT, Request, State
from proa.engine.scheduling.restoring import behind
from proa.engine.scheduling.room import Room
from proa.engine.scheduling.step_builder import StepBuilder
from proa.engine.scheduling.step_plan import StepItem, StepPlan, tokens_by_id
from proa.engine.scheduling.tiers import Tiers
from proa.engine.stats import SchedulerStats, SchedulerTotals
from proa.errors import RequestError
from proa.grammar.matcher import Follower
from proa.types import EngineRequest, FinishReason, TokenEvent

_MOST_LOOKED_AT = 32  # waiting requests whose cached prefix is looked up for one step


class Scheduler:
    """Plain data and policy; one thread. Owns the requests and, through them, every page it allocates."""

    def __init__(
        self, limits: Limits, allocator: PageAllocator, prefix_cache: PrefixCache | None,
        copy_rules: CopyRules | None = None, *, turns: bool = False, phases: Phases | None = None,
        tiers: Tiers | None = None,
    ) -> None:  # fmt: skip
        """copy_rules: for a prefix cache with copies of recurrent states. tiers: hold more pages than that cache.
        turns: while requests decode, prefill chunks are planned in a step of their own, `beside`; required by
        FixedPhases, which allow one phase per step."""
        self.limits, self._allocator, self._cache = limits, allocator, prefix_cache
        self._phases: Phases = phases or FreePhases()
        self._lookup = PrefixLookup(prefix_cache, self._phases, limits.page_tokens)
        self.room = Room(allocator, prefix_cache)
        self.behind = behind(tiers, prefix_cache, allocator, self._phases)
        self._copying = copying(prefix_cache, copy_rules or CopyRules(), self.behind, self._phases.least_tokens)
        self._requests: dict[str, Request] = {}
        self._waiting = Lineup()
        self._running = Lineup()
        self._free_states = list(range(limits.num_slots))  # slots of recurrent states, one for each running request
        self._turns = turns
        self._in_flight: list[StepPlan] = []  # oldest first
        self.beside: StepPlan | None = None  # one more in flight: prefill chunks, computed between decode steps
        self.over: StepPlan | None = None  # one more: short prompts that overtake those of `beside`
        self._ahead: tuple[StepPlan, StepPlan] | None = None  # a step planned ahead, and the one before it
        self._void: set[str] = set()  # requests whose item in flight continues with a token other than the sampled one
        self._arrivals = 0
        self._last_decoded = -1  # arrival of the request that a step decoded last
        self._totals = SchedulerTotals()

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._flying)

    @property
    def _flying(self) -> list[StepPlan]:
        return [*self._in_flight, *(step for step in (self.beside, self.over) if step)]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=self._allocator.num_pages,
            pages_free=self._allocator.num_free + self._allocator.num_lent,
            pages_cached=self._cache.num_evictable if self._cache else 0,
            state_copies=len(self._cache.copies.nodes) if self._cache and self._cache.copies else 0,
            **vars(self._totals),
        )

    # ---- intake

    def submit(self, source: EngineRequest, matcher: Follower | None = None) -> None:
        """Queue a request, or raise RequestError, ContextLengthExceeded, ResourceError or QueueFull."""
        if source.id in self._requests:
            raise RequestError(f"The request id {source.id!r} is already in use.", "Use a fresh id.")
        refuse_impossible(source, self.limits, self._allocator.num_pages)
        refuse_crowd(source, self.limits, self._waiting, len(self._running))
        request = Request(
            source, arrival=self._arrivals, context_tokens=self.limits.context_tokens,
            page_tokens=self.limits.page_tokens, matcher=matcher,
        )  # fmt: skip
        self._arrivals += 1
        self._requests[request.id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages, after the step in flight if that computes it. No event follows.

        Returns False if no request has this id or it has ended already.
        """
        request = self._requests.get(request_id)
        if request is None or request.state is State.FINISHED:
            return False
        if any(item.request is request for plan in self._flying for item in plan.items):
            request.finish()  # commit() removes it
        else:
            self._remove(request)
        return True

    # ---- a step

    @property
    def stalls(self) -> bool:
        """Whether copies of pages or lent pages are under way, so that `collect` is due soon."""
        return self.behind.busy or self.room.lent.busy

    def collect(self) -> None:
        """Go on with copies of pages and lent pages. Called before each step, and regularly while there is none."""
        self.behind.collect()
        self.room.lent.collect(len(self._running), len(self._waiting))

    def plan(self, prompt_tokens: int | None = None, short_tokens: int = 0) -> StepPlan | None:
        """Plan the next step, of requests that are in no step in flight; None if these have nothing to compute. Each
        plan must be followed by commit(). May set `beside` or `over` to a new step, whose `copy_from` copies must
        be made before the returned step writes anything. prompt_tokens, short_tokens: limits of the prefill tokens of
        both, with turns."""
        self.collect()
        most_tokens = None if self._phases.in_cells else prompt_tokens
        room_tokens = self.limits.prefill_tokens(most_tokens, turns=self._turns)
        step = StepBuilder(room_tokens, self._phases, apart=self._turns)
        self._plan_decodes(step)
        if step and not self._turns and self.limits.shared_tokens:
            step.lower_budget(self.limits.max_batch_tokens - self.limits.shared_tokens)
        first = next(self._unfinished_prompts(), None)
        if not self._turns and first is not None and first.num_left > step.budget_tokens:
            self._plan_prefills(step, step.budget_tokens // 2)
        if self.beside is None and self.over is None:
            self._plan_prefills(step)
        elif self.over is None:
            self._plan_prefills(step, min(short_tokens, self.limits.max_batch_tokens))
        if not step and self._phases.one_decode:  # the request that was to decode has been preempted
            self._plan_decodes(step)
        now, chunks = step.items()
        if chunks and self.beside is None:
            self.beside = self._step(chunks)
        elif chunks:
            self.over = self._step(chunks)
        if not now:
            return None
        self._in_flight.append(self._step(now))
        return self._in_flight[-1]

    def _step(self, items: Iterable[StepItem]) -> StepPlan:
        return StepPlan(tuple(map(self._copied, items)))

    def _copied(self, item: StepItem) -> StepItem:
        """Return the item, with a copy of its states after the step if one is due and its pages may be shared."""
        end = item.start + item.num_tokens
        if self._copying is None or self._phases.shared_tokens(item.request, end) < end:
            return item
        return self._copying.planned(item)

    def plan_ahead(self) -> StepPlan | None:
        """Plan the step after the decode step in flight before that one's tokens are known: the items that count, in
        the same order, each one token later. It must be committed after that step.

        Returns None unless the next step is certain to be one more token of the same requests: not if a request may be
        admitted, a page is missing, or a step is computed beside. Items of requests that end in the step in flight are
        dropped at commit().
        """
        if self.beside or self.over or len(self._in_flight) != 1:
            return None
        self.collect()
        items = [item for item in self._in_flight[0].items if self.counts(item)]
        needs = [self.limits.pages_for(item.start + 2) - len(item.request.pages) for item in items]
        if not self._goes_on(items) or sum(need for need in needs if need > 0) > self.room.num_available:
            return None
        for item, need in zip(items, needs, strict=True):
            if need > 0:
                item.request.pages += self.room.take(need)
        ahead = self._step(StepItem(item.request, item.start + 1, 1, True) for item in items)
        self._ahead = ahead, self._in_flight[0]
        self._in_flight.append(ahead)
        return ahead

    def counts(self, item: StepItem) -> bool:
        """Whether the results of this item in flight will be used. For a step planned ahead, ask only after the step
        before it was committed."""
        return item.request.state is not State.FINISHED and item.request.id not in self._void

    def commit(
        self, plan: StepPlan, sampled: Mapping[str, int | Sequence[int]], replaced: Collection[str] = ()
    ) -> list[TokenEvent]:
        """Take the results of a step. sampled: 1..1+lookahead_tokens new tokens of each item that samples, by id.

        All but the last of several tokens were drafts: their KV was written at the positions that follow the item.
        Returns an event for each such item whose request was not aborted; tokens after the end are dropped, the eos or
        stop token is in `stop_token` only, and the engine fills in logprobs. `replaced`: ids of requests that a step
        planned ahead continues with another token; they are preempted when that one is committed. Raises ValueError,
        with nothing changed, if `plan` is not in flight, the step before it still is, or `sampled` does not fit it.
        """
        results = self._results(plan, sampled)
        for item in plan.items:
            if self._copying and not self.counts(item):
                self._copying.forget(item)
        void = self._void & {item.request.id for item in plan.items} if self._void else self._void
        self._land(plan)
        self._void -= void
        if self._ahead is not None and self._ahead[1] is plan:
            self._ahead, self._void = None, self._void | set(replaced)
        self._totals.steps += 1
        events = []
        for item in plan.items:
            request = item.request
            if request.state is State.FINISHED:
                if self._requests.get(request.id) is request:  # else it ended at the last commit
                    self._remove(request)
                continue
            if request.id in void:  # its KV and recurrent states may follow from a token that was not sampled
                self._preempt(request)
                continue
            tokens = results.get(request.id, ())
            request.num_computed = item.start + item.num_tokens + max(0, len(tokens) - 1)
            if item.samples:
                events.append(self._accept(request, tokens))
            self._share_full_pages(request)
            if self._copying:
                self._copying.keep(item)
            if item.samples and events[-1].finish:
                self._remove(request)
        return events

    def tokens_again(self, plan: StepPlan) -> int:
        """Tokens that requests of a step in flight, of those that have not ended, would compute anew if it was given
        up."""
        living = (item for item in plan.items if self.counts(item))
        return sum(self._lookup.num_again(item.request, item.start + item.num_tokens) for item in living)

    def give_up(self, plan: StepPlan) -> None:
        """Remove a step in flight that was cancelled. Its requests that have not ended wait again, at their old
        places."""
        self._land(plan)
        for item in plan.items:
            if self._copying:
                self._copying.forget(item)
            if item.request.state is State.FINISHED:
                self._remove(item.request)
            else:
                self._return(item.request)

    def _land(self, plan: StepPlan) -> None:
        """Remove the plan from those in flight."""
        if plan is self.beside:
            self.beside = None
        elif plan is self.over:
            self.over = None
        else:
            self._in_flight = [other for other in self._in_flight if other is not plan]

    def check(self) -> None:
        """Raise IntegrityError unless every page, lock and request is accounted for exactly. Takes milliseconds."""
        check_pages(self._allocator, self._cache, self._running, self.behind.held_pages())
        check_slots(self._free_states, self._running, self.limits)
        check_lineups(self._requests, self._waiting, self._running)
        if self._copying:
            self._copying.check([item for plan in self._flying for item in plan.items])
        for request in self._requests.values():
            check_request(request, self.limits, self._cache)

    # ---- planning

    def _goes_on(self, items: Sequence[StepItem]) -> bool:
        first = next((r for r in self._waiting if not self.behind.holds(r)), None)
        return not self._void and goes_on(items, self._running, first, self.limits)

    def _plan_decodes(self, step: StepBuilder) -> None:
        held = self._held
        for request in self._running.alternating(self._last_decoded) if self._phases.one_decode else self._running:
            decodes = request.state is State.RUNNING and self._phases.decodes(request) and request.id not in held
            if decodes and self._grow(request, held):
                step.add_decode(request, 1 + self.limits.lookahead_tokens)
                self._last_decoded = request.arrival
                if self._phases.one_decode:
                    return

    @property
    def _held(self) -> frozenset[str]:
        """Ids of the requests in flight."""
        return frozenset(item.request.id for plan in self._flying for item in plan.items)

    def _plan_prefills(self, step: StepBuilder, most_tokens: int | None = None) -> None:
        """Add prefill chunks. most_tokens: add only whole prompts, with at most this many tokens in all."""
        if most_tokens == 0 or (not self._waiting and len(step) == len(self._running)):
            return
        end_tokens = 0 if most_tokens is None else step.budget_tokens - most_tokens
        leading = {r.group for r in self._running if self._leads(r)}
        num_looked = 0
        is_open = True  # False once a request does not fit: none behind it may be admitted
        for request in self._unfinished_prompts():
            room_tokens = step.budget_tokens - end_tokens
            if room_tokens < 1 or num_looked == _MOST_LOOKED_AT or step.is_closed:
                return
            waits = request.state is State.WAITING
            if step.has(request) or (waits and (not is_open or self.behind.holds(request))):
                continue
            if most_tokens is not None or self._turns:
                num_looked += waits
                num_left = self._lookup.num_left(request)
                if not step.suits(request, num_left, room_tokens, only_whole=most_tokens is not None):
                    is_open = is_open and not (waits and self._pages_short(request, self._lookup.match(request)) > 0)
                    continue
            if waits:
                if request.group in leading and self._lookup.may_match(request):
                    continue
                is_open = self._admit(request, step)
                if request.state is State.WAITING:  # it does not fit, or pages are restored for it
                    continue
                if self._leads(request):
                    leading.add(request.group)
            chunk = self._phases.chunk(request, room_tokens)
            if self._copying and not self._phases.in_cells:
                chunk = NextChunk(self._copying.chunk(request, chunk.num_tokens))
            step.add_chunk(request, chunk)

    def _unfinished_prompts(self) -> Iterator[Request]:
        """Running requests whose next step is prefill, and waiting ones, in the order of service."""
        held = self._held
        running = (r for r in self._running if not self._phases.decodes(r) and r.id not in held)
        return heapq.merge(running, self._waiting, key=lambda r: r.order)

    def _leads(self, request: Request) -> bool:
        """Whether the request is computing pages that its siblings can soon take from the prefix cache."""
        if self._cache is None or request.group == "":
            return False
        return self._copying.leads(request) if self._copying else request.num_computed < request.num_shareable

    def _admit(self, request: Request, step: StepBuilder) -> bool:
        """Start a waiting request, or restore pages for it, if a slot and pages are free or can be taken from requests
        of worse priority. Returns False if they are not."""
        held = self._held
        worse = [r for r in self._running if r.priority > request.priority and r.id not in held]
        if len(self._running) - len(worse) >= self.limits.num_slots:
            return False
        while True:
            match = self._lookup.match(request)
            short = self._pages_short(request, match)
            if short <= 0 and len(self._running) < self.limits.num_slots:
                break
            if self.room.recall(short) or not worse or short > sum(1 + len(r.pages) for r in worse):
                return False
            self._preempt(worse.pop(), step)
        most, reading = self._lookup.matchable_tokens(request), {r.copy_from for r in self._running}
        if match and self.behind.begin(request, match, most, calm=not self._in_flight, reading=reading):
            return True
        self._waiting.remove(request)
        self._running.add(request)
        if self._cache and match:
            self._cache.lock(match.node)
            self._allocator.share(match.pages)
        self._count_prompt(request, match)
        request.admit(match.pages if match else [], match.node if match else None, self._free_states.pop())
        if self._copying and match:
            self._copying.admit(request, match)
        self.behind.shared(request)
        request.pages += self.room.take(self._pages_needed(request))
        return True

    def _count_prompt(self, request: Request, match: PrefixMatch | None) -> None:
        if request.num_cached is None:
            request.num_cached = len(match.pages) * self.limits.page_tokens if match else 0
            self._totals.prompt_tokens += request.num_prompt
            self._totals.cached_prompt_tokens += request.num_cached

    def _pages_short(self, request: Request, match: PrefixMatch | None) -> int:
        """Number of pages missing to admit the request; each running request keeps one spare page to grow into."""
        matched, idle = (len(match.pages), match.num_idle) if match else (0, 0)
        available = self.room.num_available - idle - len(self._running)
        return self.limits.pages_for(len(request.tokens) + self.limits.lookahead_tokens) - matched - available

    def _grow(self, request: Request, held: Collection[str]) -> bool:
        """Allocate the page that the next token needs. False if the request was preempted itself, or must wait for a
        page that is lent, or of a request in flight (`held`)."""
        need = self._pages_needed(request)
        while need > self.room.num_available:
            if self.room.recall(need - self.room.num_available):
                return False
            victim = self._running.last_but(held)
            if victim is request and held:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        if need > 0:
            request.pages += self.room.take(need)
        return True

    def _preempt(self, request: Request, step: StepBuilder | None = None) -> None:
        if step:
            step.remove(request)
        self._return(request)
        self._totals.preemptions += 1

    def _return(self, request: Request) -> None:
        """Let a running request wait again, without its pages."""
        self._running.remove(request)
        self._release(request)
        request.preempt()
        self._waiting.add(request)

    # ---- results

    def _results(self, plan: StepPlan, sampled: Mapping[str, int | Sequence[int]]) -> dict[str, Sequence[int]]:
        follows = self._ahead is not None and self._ahead[0] is plan
        if follows or not any(plan is one for one in self._flying):
            raise ValueError("this plan cannot be committed: it is not in flight, or the step before it still is")
        counted = [item for item in plan.items if item.samples and self.counts(item)]
        return tokens_by_id(counted, sampled, 1 + self.limits.lookahead_tokens)

    def _accept(self, request: Request, tokens: Sequence[int]) -> TokenEvent:
        """Append sampled tokens up to the end of the answer; the KV of drafts beyond it is discarded."""
        num_before = len(request.tokens)
        finish: FinishReason | None = None
        for token in tokens:
            finish = request.append(token)
            if finish:
                break
        request.truncate(len(request.tokens))
        accepted = request.tokens[num_before:]
        self._totals.generated_tokens += len(accepted)
        is_first = num_before == request.num_prompt
        return TokenEvent(
            id=request.id,
            tokens=accepted,
            cached_tokens=request.num_cached if is_first else None,
            prompt_experts=request.prompt_experts if is_first else None,
            finish=finish,
            stop_token=request.stop_token,
        )

    def _share_full_pages(self, request: Request) -> None:
        num_tokens = self._phases.shared_tokens(request, request.num_computed)
        first, last = request.num_shared // self.limits.page_tokens, num_tokens // self.limits.page_tokens
        if self._cache is None or request.node is None or first >= last:
            return
        keys = self._lookup.keys(self._cache, request, last)[first:]
        own = request.pages[first:last]
        request.node, held = self._cache.insert(request.node, keys, own)
        if held != own:
            request.pages = [*request.pages[:first], *held, *request.pages[last:]]
        self.behind.shared(request)

    def _remove(self, request: Request) -> None:
        if self._copying:
            self._copying.end(request)
        (self._waiting if request.state is State.WAITING else self._running).remove(request)
        self._release(request)
        del self._requests[request.id]
        if request.state is not State.FINISHED:
            request.finish()

    def _pages_needed(self, request: Request) -> int:
        """Number of additional pages for all the request's tokens and the drafts of the next step."""
        return self.limits.pages_for(len(request.tokens) + self.limits.lookahead_tokens) - len(request.pages)

    def _release(self, request: Request) -> None:
        self._allocator.release(request.pages)
        if self._cache and request.node:
            self._cache.unlock(request.node)
        if request.state_slot != NO_SLOT:
            self._free_states.append(request.state_slot)
        request.forget_pages()
