"""A fake engine around the real Scheduler: a deterministic "model" over a fake KV pool that detects wrong pages.

The KV of a token depends on all tokens before it, so a slot holds (token, digest of the prefix that ends there). The
model reads the slots that attention would read, through the page tables; the next token is a function of the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from proa.cache.pages import PageAllocator
from proa.cache.radix import PrefixCache
from proa.cache.states import StateCopies
from proa.engine.executors.page_table import PageTable
from proa.engine.scheduling.copying import CopyRules
from proa.engine.scheduling.phases import FixedPhases, FreePhases
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.request import NO_SLOT, Request, State
from proa.engine.scheduling.scheduler import Scheduler
from proa.engine.scheduling.step_plan import StepItem, StepPlan
from proa.types import EngineRequest, FinishReason, Sampling, TokenEvent
from tiers_sim import SimTiers

VOCAB = 12
EOS = 0
_SEED = 14695981039346656037
_MASK = 2**64 - 1


def digest(before: int, token: int) -> int:
    """FNV-1a, with a shift so that the low bits depend on all bits."""
    mixed = ((before ^ (token + 1)) * 1099511628211) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(prefix_digest: int) -> int:
    return prefix_digest % VOCAB


Tables = dict[str, tuple[list[int], int]]


@dataclass
class Answer:
    """The answer that a request must yield, or has yielded so far."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None


def predict(request: EngineRequest, context_tokens: int) -> Answer:
    """The expected complete answer, computed without cache, batches and scheduling."""
    state, answer, sampling = _SEED, Answer(), request.sampling
    for token in request.tokens:
        state = digest(state, token)
    while True:
        token = next_token(state)
        stops = (*sampling.eos_token_ids, *sampling.stop_token_ids)
        if token in stops and len(answer.tokens) >= sampling.min_tokens:
            answer.finish, answer.stop_token = "stop", token
            return answer
        answer.tokens.append(token)
        state = digest(state, token)
        length = len(request.tokens) + len(answer.tokens)
        if len(answer.tokens) == sampling.max_tokens or length == context_tokens:
            answer.finish = "length"
            return answer


class FakeEngine:
    """Runs steps, collects answers, and checks the scheduler's promises in every step."""

    def __init__(
        self, limits: Limits, num_pages: int, with_cache: bool = True, copies: int = 0, rules: CopyRules | None = None,
        *, turns: bool = False, phases: FixedPhases | None = None, least_tokens: int = 1, tiers: SimTiers | None = None,
    ) -> None:  # fmt: skip
        """copies: number of copies of recurrent states; with 0 and a cache, the model has no recurrent states. phases:
        None means FreePhases(least_tokens)."""
        self.limits, self.phases = limits, phases
        self.allocator = PageAllocator(num_pages)
        self.copies = StateCopies(limits.num_slots, copies) if copies else None
        self.cache = PrefixCache(limits.page_tokens, self.allocator, self.copies) if with_cache else None
        self.tiers = tiers
        self.scheduler = Scheduler(
            limits, self.allocator, self.cache, rules,
            turns=turns, phases=phases or FreePhases(least_tokens), tiers=tiers,
        )  # fmt: skip
        self.recurrent = not limits.lookahead_tokens and (self.cache is None or self.copies is not None)
        self.pool: dict[tuple[int, int], tuple[int, int, str]] = {}  # (page, slot) -> (token, digest, kernel)
        self.states: dict[int, int] = {}  # state slot -> digest, in place of recurrent states
        if tiers:
            tiers.pool, tiers.states = self.pool, self.states
        self.asked: dict[str, EngineRequest] = {}
        self.got: dict[str, Answer] = {}
        self.cached_tokens: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.plans: list[StepPlan] = []  # in flight, oldest first
        self.tables: list[Tables] = []  # their pages and state slots at the launch
        self.beside: tuple[StepPlan, Tables] | None = None
        self.over: tuple[StepPlan, Tables] | None = None
        self.spoiled: set[tuple[int, str]] = set()  # (id of a plan in flight, id of a request): computed, and discarded
        self.kernels_table = torch.zeros(limits.num_slots, limits.context_tokens + 9, dtype=torch.int32)
        self.page_table = PageTable(self.kernels_table)
        self.finished: list[str] = []
        self.passes = 0  # streamed steps with cells of several prompts

    def submit(self, request: EngineRequest) -> None:
        self.scheduler.submit(request)
        self.asked[request.id] = request
        self.got[request.id] = Answer()

    def abort(self, request_id: str) -> None:
        if self.scheduler.abort(request_id):
            self.aborted.add(request_id)

    def begin(self, short_tokens: int = 0) -> StepPlan | None:
        """Plan and launch a step. There must be one unless all work is in flight or beside. short_tokens: most tokens
        of a step that overtakes the one beside."""
        plan = self.scheduler.plan(short_tokens=short_tokens)
        beside, over = self.scheduler.beside, self.scheduler.over
        idle = plan is None and beside is None and over is None and not self.plans
        assert not idle or not self.scheduler.has_work or self.scheduler.stalls
        now = plan.items if plan else ()
        if beside is not None and self.beside is None:
            self.beside = self._begin_beside(beside, now)
        if over is not None and self.over is None:
            assert self.beside is not None
            assert over.num_tokens <= short_tokens
            self.over = self._begin_beside(over, (*now, *self.beside[0].items))
        if plan:
            self._check_plan(plan)
            self._launch(plan)
        return plan

    def begin_ahead(self) -> StepPlan | None:
        """Plan the step after the one in flight; it must have the items that count, each one token later."""
        before = [list(item.request.pages) for item in self.plans[0].items]
        plan = self.scheduler.plan_ahead()
        if plan is None:
            assert before == [item.request.pages for item in self.plans[0].items], "no plan, but pages were taken"
            return None
        self._check_ahead(plan)
        self._launch(plan)
        return plan

    def finish(
        self, plan: StepPlan, drafts: int = 0, replaced: Callable[[str], bool] = lambda name: False
    ) -> list[TokenEvent]:
        """Compute the step, with `drafts` extra tokens for each item that samples, and commit it. `replaced`: whether
        the step planned ahead continues a request with another token than the one sampled here."""
        at = next(i for i, launched in enumerate(self.plans) if launched is plan)
        del self.plans[at]
        table = self.tables.pop(at)
        self._copy_before(plan, table)
        return self._end(plan, table, drafts, replaced)

    def may_finish(self) -> list[StepPlan]:
        """Steps in flight whose results may come next. A device computes them in the order of their launch, which
        matters with a step planned ahead (a row that no longer counts writes to pages that another request may own by
        now, a row may read a page for which the tree has another one by now) and with reused slots of copies."""
        rows = [name for table in self.tables for name in table]
        ended = any(not self.scheduler.counts(item) for plan in self.plans for item in plan.items)
        return self.plans[:1] if ended or self.moved or self.copies or len(set(rows)) < len(rows) else self.plans

    @property
    def moved(self) -> bool:
        """Whether a step ahead reads a page for which its request got the tree's page since. An engine plans no step
        beside it meanwhile, which may be computed first, and may own that page."""
        return any(
            table[item.request.id][0] != item.request.pages[: len(table[item.request.id][0])]
            for plan, table in zip(self.plans, self.tables, strict=True)
            for item in plan.items
        )

    def finish_beside(self) -> list[TokenEvent]:
        """Compute the last part of the step beside, and commit it."""
        assert self.beside is not None
        (plan, table), self.beside = self.beside, None
        return self._end(plan, table, 0, lambda name: False)

    def finish_over(self) -> list[TokenEvent]:
        """Compute the last part of the step that overtakes, and commit it."""
        assert self.over is not None
        (plan, table), self.over = self.over, None
        return self._end(plan, table, 0, lambda name: False)

    def give_up(self) -> None:
        """Cancel the step that is computed now of those beside: whatever it wrote is lost."""
        if self.over is not None:
            (plan, _), self.over = self.over, None
        else:
            assert self.beside is not None
            (plan, _), self.beside = self.beside, None
        self.spoiled = {key for key in self.spoiled if key[0] != id(plan)}
        again = [item.request for item in plan.items if self.scheduler.counts(item)]
        most = sum(item.start + item.num_tokens for item in plan.items if item.request in again)
        assert bool(again) <= self.scheduler.tokens_again(plan) <= most
        self.scheduler.give_up(plan)
        assert all(request.state is State.WAITING for request in again)

    def _begin_beside(self, plan: StepPlan, others: Sequence[StepItem]) -> tuple[StepPlan, Tables]:
        """Launch a step beside. A device may compute any part of it at any time until it is finished, so its pages
        and states get wrong values now: no other step may read them. others: items of the steps in flight."""
        self._check_plan(plan)
        for before, at in zip(self.plans, self.tables, strict=True):  # a device computes them first
            self._spoil_ended(before, at)
        slots = {item.request.state_slot for item in (*plan.items, *others)}
        assert len(slots) == len(plan.items) + len(others)
        table = self._tables_of(plan)
        self._copy_before(plan, table)
        for item in plan.items:
            pages, state_slot = table[item.request.id]
            self._spoil(item, pages, self.states.get(state_slot, -1), state_slot)
        return plan, table

    def _copy_before(self, plan: StepPlan, table: Tables) -> None:
        self.states |= {table[i.request.id][1]: self.states[i.copy_from] for i in plan.items if i.copy_from != NO_SLOT}

    def _end(
        self, plan: StepPlan, table: Tables, drafts: int, replaced: Callable[[str], bool]
    ) -> list[TokenEvent]:  # fmt: skip
        items = [item for item in plan.items if self.scheduler.counts(item)]
        sampled = {}
        for item in plan.items:
            if self.scheduler.counts(item) and (tokens := self._compute(item, drafts, *table[item.request.id])):
                sampled[item.request.id] = tokens
        self._spoil_ended(plan, table)
        for item in plan.items:
            if item.copy_to != NO_SLOT:
                self.states[item.copy_to] = self.states[table[item.request.id][1]]
        self.spoiled = {key for key in self.spoiled if key[0] != id(plan)}
        events = self.scheduler.commit(plan, sampled, [name for name in sampled if replaced(name)])
        assert [e.id for e in events] == [item.request.id for item in items if item.samples]
        for event in events:
            self._take(event)
        return events

    def step(self, drafts: int = 0) -> StepPlan | None:
        """Plan and finish a step, and the step beside it if there is one."""
        plan = self.begin()
        if plan:
            self.finish(plan, drafts)
        if self.over:
            self.finish_over()
        if self.beside:
            self.finish_beside()
        return plan

    def drain(self) -> None:
        """Run until idle within the number of steps that the rules bound, then check that nothing is left behind.

        The first running request advances in every step. It can lose its place only to a request before it in the order
        of service, which then is first until it ends, so each request costs at most two contexts of steps.
        """
        live = [r for r in self.asked if r not in self.finished and r not in self.aborted]
        for _ in range(2 * (len(live) + 1) * self.limits.context_tokens):
            if not self.scheduler.has_work:
                break
            self.step(self.limits.lookahead_tokens)
            if self.tiers:
                self.tiers.advance(1.0)
            self.scheduler.check()
        assert not self.scheduler.has_work, "starved"
        while self.tiers and self.scheduler.behind.busy:
            self.tiers.advance(1.0)
            self.scheduler.behind.collect()
        self.check_answers()
        self.check_idle()

    def check_answers(self) -> None:
        """Every request ended exactly once, with the whole answer and nothing else."""
        assert len(self.finished) == len(set(self.finished))
        assert set(self.finished) | self.aborted == set(self.asked)
        assert not set(self.finished) & self.aborted
        for request_id in self.finished:
            assert self.got[request_id] == predict(self.asked[request_id], self.limits.context_tokens)
            assert 0 <= self.cached_tokens[request_id] < len(self.asked[request_id].tokens)

    def check_idle(self) -> None:
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        if self.cache:
            self.cache.evict(stats.pages_total)
            self.scheduler.check()
        assert self.allocator.num_free == stats.pages_total

    def _check_plan(self, plan: StepPlan) -> None:
        self._check_phase(plan)
        limits, ids = self.limits, [item.request.id for item in plan.items]
        assert len(set(ids)) == len(ids)
        assert plan.num_tokens <= max(limits.max_batch_tokens, limits.pass_tokens)
        assert len(ids) <= limits.max_running
        assert len({item.request.state_slot for item in plan.items}) == len(ids)
        assert all(0 <= item.request.state_slot < limits.num_slots for item in plan.items)
        tree = set(self.cache.pages()) if self.cache else set()
        written: set[tuple[int, int]] = set()
        for item in plan.items:
            assert item.num_tokens >= 1
            assert item.start == item.request.num_computed
            assert item.samples == (item.start + item.num_tokens == len(item.request.tokens))
            extra = limits.lookahead_tokens if item.samples else 0
            slots = [self._slot(item.request.pages, i) for i in range(item.start, item.start + item.num_tokens + extra)]
            assert not written & set(slots), "two sequences write to one slot"
            assert not tree & {page for page, _ in slots}, "a shared page is written"
            written.update(slots)

    def _check_ahead(self, plan: StepPlan) -> None:
        before = [item for item in self.plans[0].items if self.scheduler.counts(item)]
        assert [(i.request, i.start + 1, 1, True) for i in before] == [
            (i.request, i.start, i.num_tokens, i.samples) for i in plan.items
        ], "a step ahead must have the items that count, in their order, one token later"
        assert all(item.start < item.request.max_length for item in plan.items), "a token beyond the longest answer"
        assert any(item.start + 1 < item.request.max_length for item in plan.items), "every request ends before it"
        tree = set(self.cache.pages()) if self.cache else set()
        slots = [self._slot(item.request.pages, item.start) for item in plan.items]
        slots += [self._slot(item.request.pages, item.start) for item in before]
        assert len(set(slots)) == len(slots)
        assert not tree & {page for page, _ in slots}, "a shared page is written"

    def _launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.tables.append(self._tables_of(plan))
        for place, item in enumerate(plan.items):
            self.page_table.set(place, item.request.pages)
            there = self.kernels_table[place, : len(item.request.pages)].tolist()
            assert there == item.request.pages, "a list of pages was changed, not only appended to"
        into = [item.copy_to for item in plan.items if item.copy_to != NO_SLOT]
        assert len(set(into)) == len(into), "two states are copied into one slot"

    def _tables_of(self, plan: StepPlan) -> Tables:
        return {i.request.id: (list(i.request.pages), i.request.state_slot) for i in plan.items}

    def _slot(self, pages: list[int], position: int) -> tuple[int, int]:
        size = self.limits.page_tokens
        return pages[position // size], position % size

    def _spoil_ended(self, plan: StepPlan, table: Tables) -> None:
        """Spoil once what items write that no longer count: their pages and slots may belong to others by now."""
        for item in plan.items:
            if not self.scheduler.counts(item) and (key := (id(plan), item.request.id)) not in self.spoiled:
                self.spoiled.add(key)
                pages, state_slot = table[item.request.id]
                self._spoil(item, pages, -1, state_slot)

    def _spoil(self, item: StepItem, pages: list[int], state: int, state_slot: int) -> None:
        """Write wrong KV and `state` in place of the item's: for an item that no longer counts, or is not finished."""
        for position in range(item.start, item.start + item.num_tokens):
            self.pool[self._slot(pages, position)] = (-1, -1, "")
        self.states[state_slot] = state

    def _compute(self, item: StepItem, drafts: int, pages: list[int], state_slot: int) -> list[int]:
        """Write the item's KV, read the whole prefix back, return the sampled tokens (the last one not computed)."""
        tokens, state, sampled = item.request.tokens, _SEED, []
        for position in range(item.start + item.num_tokens):
            state = digest(state, tokens[position])
            if position >= item.start:
                self.pool[self._slot(pages, position)] = (tokens[position], state, self._kernel(item, position))
            want = tokens[position], state, self._fixed_kernel(item.request, position)
            assert self.pool[self._slot(pages, position)] == want, "stale page, another request's, or another kernel"
        if self.recurrent:
            self._advance_state(item, state_slot, state)
        if item.samples:
            sampled.append(next_token(state))
            for position in range(len(tokens), len(tokens) + drafts):
                state = digest(state, sampled[-1])
                self.pool[self._slot(pages, position)] = (sampled[-1], state, "")
                sampled.append(next_token(state))
        return sampled

    def _kernel(self, item: StepItem, position: int) -> str:
        """Name of the kernel that the bits of this row of the item depend on; "" if phases are free."""
        if self.phases is None:
            return ""
        if item.start >= item.request.num_prompt:
            return "decode"
        if self.phases.cells is None:
            return "prompt"
        start = max(item.start, position - position % self.phases.cells.tokens)
        end = position - position % self.phases.cells.tokens + self.phases.cells.tokens
        return self._of_cell(item.request, start, min(end, item.start + item.num_tokens))

    def _of_cell(self, request: Request, start: int, end: int) -> str:
        """Bits depend on all tokens of a cell: they decide how many rows each expert gets."""
        state = _SEED
        for token in request.tokens[start:end]:
            state = digest(state, token)
        return f"prompt {start} {end} {state}"

    def _fixed_kernel(self, request: Request, position: int) -> str:
        """The kernel that must have computed this position, which depends on the request alone."""
        if self.phases is None:
            return ""
        if position >= request.num_prompt:
            return "decode"
        if self.phases.cells is None:
            return "prompt"
        start = position - position % self.phases.cells.tokens
        return self._of_cell(request, start, min(start + self.phases.cells.tokens, request.num_prompt))

    def _check_phase(self, plan: StepPlan) -> None:
        """With fixed phases, a step must have rows of one phase, and only one request if phases say so. Cells are all
        streamed, or there is only one."""
        if self.phases is None:
            return
        (decodes,) = {item.start >= item.request.num_prompt for item in plan.items}
        if decodes:
            assert len(plan.items) == 1 or not self.phases.one_decode
        elif (cells := self.phases.cells) is not None:
            firsts = [
                (first, item.request.num_prompt)
                for item in plan.items
                for first in range(item.start, item.start + item.num_tokens, cells.tokens)
            ]
            (streamed,) = {cells.streams(*first) for first in firsts}
            most = max(1, self.limits.prefill_tokens(None, turns=True) // cells.tokens) if streamed else 1
            assert len(firsts) <= most
            assert not (streamed and plan is self.scheduler.over), "a step that overtakes is no pass"
            self.passes += streamed and len(plan.items) > 1

    def _advance_state(self, item: StepItem, state_slot: int, want: int) -> None:
        """Advance the state in the request's slot by the item's tokens; it must be that of the whole prefix."""
        state = self.states[state_slot] if item.start else _SEED
        for token in item.request.tokens[item.start : item.start + item.num_tokens]:
            state = digest(state, token)
        assert state == want, "another sequence's state"
        self.states[state_slot] = state

    def _take(self, event: TokenEvent) -> None:
        answer = self.got[event.id]
        assert answer.finish is None, "an event after the end"
        assert (event.cached_tokens is not None) == (event.id not in self.cached_tokens)
        if event.cached_tokens is not None:
            self.cached_tokens[event.id] = event.cached_tokens
        answer.tokens += event.tokens
        answer.finish, answer.stop_token = event.finish, event.stop_token
        if event.finish:
            self.finished.append(event.id)


def make_limits(**changes: int) -> Limits:
    roomy = Limits(
        context_tokens=64,
        page_tokens=4,
        max_running=4,
        max_batch_tokens=16,
        max_queued=1000,
        max_queued_tokens=1_000_000,
    )
    return Limits(**{name: changes.get(name, getattr(roomy, name)) for name in Limits.__slots__})


def ask(
    request_id: str,
    tokens: Collection[int],
    max_tokens: int = 4,
    *,
    group: str = "",
    priority: int = 0,
    **wishes: object,
) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, **{"eos_token_ids": (), **wishes})  # type: ignore[arg-type]
    return EngineRequest(id=request_id, tokens=list(tokens), sampling=sampling, group=group, priority=priority)
