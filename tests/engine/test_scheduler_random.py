"""Scheduler under random schedules: nothing leaked, lost, starved or mixed up.

Two generators over the same FakeEngine, which checks every plan, every KV read and every answer: a hypothesis
state machine (which shrinks what it finds) and a plain seeded loop (many more schedules per second).
PROA_SCHEDULES=20000 runs a long exploration of either.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from examples import examples
from proa.engine.scheduling.copying import CopyRules
from proa.engine.scheduling.phases import FixedPhases
from proa.engine.scheduling.policy import Limits
from proa.errors import ContextLengthExceeded, QueueFull, ResourceError
from proa.plan.cells import Cells
from proa.types import EngineRequest, Sampling
from scheduler_sim import EOS, VOCAB, FakeEngine, make_limits
from tiers_sim import SimTiers

NUM_SCHEDULES = int(os.environ.get("PROA_SCHEDULES", "0"))
CONTEXT = 40
# Few, overlapping beginnings, so that requests share pages, whole prompts and each other's answers.
STEMS = [[], [1] * 40, [1, 2, 3, 4] * 10, [1] * 7 + [2] * 33]


def make_engine(random: Random) -> FakeEngine:
    """Tiny pools (down to one context), odd page sizes and chunks."""
    page_tokens = random.choice([1, 2, 3, 4, 8])
    one_context = -(-CONTEXT // page_tokens)
    lookahead = random.choice([0, 0, 0, 2])
    limits = make_limits(
        context_tokens=CONTEXT,
        page_tokens=page_tokens,
        max_running=random.choice([1, 3, 8, 8]),
        max_batch_tokens=random.choice([1, 4, 8, 16, 64]) + lookahead,
        max_queued=random.choice([0, 3, 50]),
        max_queued_tokens=random.choice([30, 100_000]),
        lookahead_tokens=lookahead,
    )
    num_pages = random.randint(max(1, one_context // 4), one_context * 3 // 2)
    with_cache = random.random() < 0.8
    copies = random.choice([0, 0, 1, 2, 6, 40]) if with_cache and not lookahead else 0
    rules = CopyRules(
        every_tokens=random.choice([1, 4, 8]), cut_tokens=random.choice([4, 8]), asking_tokens=random.choice([1, 4])
    )
    phases = None if lookahead or random.random() < 0.6 else fixed_phases(random, limits, copies=copies > 0)
    if phases is not None and phases.cells is not None:
        limits = replace(limits, pass_tokens=random.choice([0, 2, 5]) * phases.cells.tokens)
    turns = phases is not None or random.random() < 0.7
    tiers = make_tiers(random, page_tokens) if with_cache and random.random() < (0.9 if copies else 0.5) else None
    return FakeEngine(
        limits, num_pages, with_cache, copies, rules,
        turns=turns, phases=phases, least_tokens=5 if num_pages % 4 == 0 else 1, tiers=tiers,
    )  # fmt: skip


def make_tiers(random: Random, page_tokens: int) -> SimTiers:
    """Tiers that may lose runs, refuse to restore or store, and hold nothing at first."""
    ill, refuse = random.choice([0.0, 0.1, 0.5]), random.choice([0.0, 0.0, 0.3])
    return SimTiers(random, random.choice([1, 1, 2, 3]), page_tokens, ill=ill, refuse=refuse)


def fixed_phases(random: Random, limits: Limits, *, copies: bool) -> FixedPhases:
    """Phases as with --deterministic: with or without cells, which fit into a step, and of which some are streamed."""
    sizes = [cell for cell in (8, 16, 24) if cell <= limits.max_batch_tokens and cell % limits.page_tokens == 0]
    cells = [None, *(Cells(size, random.choice([0, 1, 3, size])) for size in sizes)]
    return FixedPhases(random.choice(cells), one_decode=random.random() < 0.5, keeps_states=copies)


def make_request(random: Random, request_id: str) -> EngineRequest:
    stem = random.choice(STEMS)
    tokens = stem[: random.randint(0, 24)] + [random.randrange(VOCAB) for _ in range(random.randint(0, 8))]
    group = random.choice(["", "", "g1", "g2"])
    if group:
        tokens = STEMS[int(group[1])][: random.choice([9, 25])]
    sampling = Sampling(
        max_tokens=random.choice([1, 3, 9, 17, 30]),
        min_tokens=random.choice([0, 0, 3]),
        eos_token_ids=random.choice([(), (EOS,)]),
        stop_token_ids=random.choice([(), (), (), (3,)]),
        prompt_logprobs=random.choice([None, None, None, 1]),
    )
    return EngineRequest(
        id=request_id,
        tokens=tokens or [5],
        sampling=sampling,
        priority=random.choice([0, 0, 0, 1, -1]),
        group=group,
        salt=random.choice(["", "", "", "salt"]),
    )


def try_submit(fake: FakeEngine, request: EngineRequest) -> None:
    """Submit; a refusal is fine and must change nothing."""
    before = fake.scheduler.stats()
    try:
        fake.submit(request)
    except (ContextLengthExceeded, ResourceError, QueueFull):
        assert fake.scheduler.stats() == before


def run_schedule(seed: int) -> tuple[FakeEngine, int, int, int, int, int]:
    """Returns the idle engine, its numbers of steps planned ahead, beside and over, the most steps in flight, and the
    steps beside that were given up."""
    random, most, given_up = Random(seed), 0, 0
    fake, ahead, beside, over, patience = make_engine(random), 0, 0, 0, random.choice([0.2, 0.7, 1.0])
    short_tokens = random.choice([0, 1, 5, 12])
    num_submitted, eagerness, hurry = 0, random.choice([0.3, 1.0, 3.0]), random.choice([0.0, 0.9, 1.0])
    depth = random.choice([1, 1, 2, 4])  # steps in flight, each of different requests
    for _ in range(random.randint(5, 60)):
        for _ in range(int(random.expovariate(1 / eagerness))):
            try_submit(fake, make_request(random, f"r{num_submitted}"))
            num_submitted += 1
        while len(fake.plans) < depth and not fake.moved:
            if fake.begin(short_tokens if random.random() < 0.5 else 0) is None:
                break
            most = max(most, len(fake.plans))
            if depth > 2 and random.random() < 0.3:  # a request that is in no step yet
                try_submit(fake, make_request(random, f"r{num_submitted}"))
                num_submitted += 1
        if len(fake.plans) == 1 and random.random() < hurry:
            ahead += fake.begin_ahead() is not None
        while random.random() < 0.1 and fake.asked:
            fake.abort(random.choice(list(fake.asked)))
        if random.random() < 0.2:
            try_submit(fake, make_request(random, f"r{num_submitted}"))
            num_submitted += 1
        if fake.plans:
            drafts = random.randint(0, fake.limits.lookahead_tokens)
            fake.finish(random.choice(fake.may_finish()), drafts, lambda name: random.random() < 0.05)
        if fake.over and random.random() < patience:
            fake.finish_over()
            over += 1
        if fake.beside and (not fake.over or random.random() < 0.1) and random.random() < patience:
            fake.finish_beside()
            beside += 1
        if fake.beside and random.random() < 0.05:
            fake.give_up()
            given_up += 1
        if fake.tiers:
            fake.tiers.advance(patience)
            if fake.cache and random.random() < 0.3:
                fake.cache.evict(random.randint(1, 20))
            if fake.copies and random.random() < 0.3 and (slot := fake.copies.take()) is not None:
                fake.copies.give_back(slot)
        fake.scheduler.check()
    while fake.plans:
        fake.finish(fake.plans[0])
    fake.drain()
    return fake, ahead, beside, over, most, given_up


@pytest.mark.parametrize("block", range(examples(10)))
def test_seeded_schedules(block: int) -> None:
    per_block = NUM_SCHEDULES // 10 or 300
    finished = preempted = cached = aborted = ahead = beside = over = copied = restored = states = passes = most = 0
    given_up = 0
    for seed in range(block * per_block, (block + 1) * per_block):
        try:
            fake, *steps = run_schedule(seed)
        except Exception as error:
            error.add_note(f"run_schedule({seed})")
            raise
        ahead, beside, over, most = ahead + steps[0], beside + steps[1], over + steps[2], max(most, steps[3])
        given_up += steps[4]
        stats = fake.scheduler.stats()
        finished += len(fake.finished)
        preempted += stats.preemptions
        cached += stats.cached_prompt_tokens
        copied += stats.cached_prompt_tokens if fake.copies else 0
        aborted += len(fake.aborted)
        passes += fake.passes
        restored += fake.tiers.restored_pages if fake.tiers else 0
        states += fake.tiers.restored_states if fake.tiers else 0
    counts = (finished, preempted, cached, aborted, ahead, 2 * beside, 20 * over, copied, 6 * restored, 50 * states)
    assert min(*counts, 50 * passes, 20 * given_up) > per_block, "the schedules exercise too little"
    assert most >= 3


class Schedules(RuleBasedStateMachine):
    """Rules of a frontend and of an engine loop, in any order that the API allows."""

    fake: FakeEngine
    num_submitted = 0

    @initialize(random=st.randoms(use_true_random=False))
    def start(self, random: Random) -> None:
        self.fake = make_engine(random)

    @rule(random=st.randoms(use_true_random=False))
    def submit(self, random: Random) -> None:
        try_submit(self.fake, make_request(random, f"r{self.num_submitted}"))
        self.num_submitted += 1

    @precondition(lambda self: self.num_submitted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.fake.abort(f"r{data.draw(st.integers(0, self.num_submitted - 1))}")

    @precondition(lambda self: not self.fake.plans)
    @rule(short_tokens=st.sampled_from([0, 4, 16]))
    def begin_step(self, short_tokens: int) -> None:
        self.fake.begin(short_tokens)

    @precondition(lambda self: len(self.fake.plans) == 1)
    @rule()
    def begin_step_ahead(self) -> None:
        self.fake.begin_ahead()

    @precondition(lambda self: self.fake.plans)
    @rule(drafts=st.integers(0, 2), replaced=st.sampled_from(["", "", "02468", "0123456789"]))
    def finish_step(self, drafts: int, replaced: str) -> None:
        drafts = min(drafts, self.fake.limits.lookahead_tokens)
        self.fake.finish(self.fake.plans[0], drafts, lambda name: name[-1] in replaced)

    @precondition(lambda self: self.fake.over)
    @rule()
    def finish_over(self) -> None:
        self.fake.finish_over()

    @precondition(lambda self: self.fake.beside)
    @rule()
    def finish_beside(self) -> None:
        self.fake.finish_beside()

    @precondition(lambda self: self.fake.beside)
    @rule()
    def give_up(self) -> None:
        self.fake.give_up()

    @precondition(lambda self: not self.fake.plans)
    @rule(steps=st.integers(1, 30))
    def hurry_for_a_while(self, steps: int) -> None:
        """Run as an engine whose device is always one step ahead."""
        for _ in range(steps):
            if not self.fake.plans and not self.fake.begin():
                return
            self.fake.begin_ahead()
            self.fake.finish(self.fake.plans[0])

    @precondition(lambda self: not self.fake.plans)
    @rule(steps=st.integers(1, 10))
    def run_for_a_while(self, steps: int) -> None:
        for _ in range(steps):
            self.fake.step()

    @precondition(lambda self: self.fake.tiers)
    @rule(num_evicted=st.integers(0, 20))
    def advance_tiers(self, num_evicted: int) -> None:
        assert self.fake.tiers
        assert self.fake.cache
        self.fake.tiers.advance(1.0)
        self.fake.cache.evict(num_evicted)

    @invariant()
    def nothing_is_leaked(self) -> None:
        self.fake.scheduler.check()

    def teardown(self) -> None:
        while self.fake.plans:
            self.fake.finish(self.fake.plans[0])
        self.fake.drain()


Schedules.TestCase.settings = settings(
    max_examples=NUM_SCHEDULES or examples(300),
    stateful_step_count=50,
    deadline=None,
    derandomize=not NUM_SCHEDULES,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no defect
)
TestSchedules = Schedules.TestCase
