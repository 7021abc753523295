"""A trial at the first start: decode steps of the loaded model under each plan that is likely the fastest. Never: which
plans those are (plan/likely.py), the file of the result (kept_trial.py), choices that need another load.

Rounds interleave the plans, so that other load on the machine affects all of them, and in a round all compute the same
tokens and so the same experts. A plan other than the rule is taken only if it wins beyond the noise (`best`), and takes
part only as long as it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from proa.config.env import read_env
from proa.engine.building.kept_trial import Kept, keep, key_of, read_kept, share_in_vram
from proa.engine.executors.batch import Span, StepBatch
from proa.engine.executors.executor import Executor
from proa.engine.ipc import Loading
from proa.errors import UsageError
from proa.hybrid.choices import NONE, Choices
from proa.hybrid.model import HybridModel
from proa.models.spec import Model
from proa.native.doorbell import FORESEEN_ROWS
from proa.obs.progress import TRYING
from proa.obs.units import format_duration, format_ms
from proa.plan.likely import likely
from proa.plan.plan import Plan
from proa.sampling.rows import Row
from proa.types import Decision, Sampling

ROW = "plan trial"
TRIAL_S = 10.0  # no step begins that would end later, if it takes as long as the longest one so far
ROUNDS = 11
PART_S = 0.0125  # of timed steps of one plan and one number of requests in a round
MOST_STEPS = 8  # of these
LEARNING_STEPS = 16  # most steps until co-fetch knows the CPU's rate
# A plan other than the rule is taken only if
CHANCE = 0.01  # two equal plans would give it as many of the rounds with at most this probability,
CLEAR = 0.98  # and the median of its time over the rule's is below this.
_TOKEN_STRIDE = 7919
_GREEDY = Sampling(max_tokens=1, temperature=0.0)
_SAME = "co-fetch on and off are the same, as the CPU leaves no RAM bandwidth or has read too little"
_NAMES = {"co-fetch": "co_fetch", "read ahead": "read_ahead"}  # rows of the start-up table


class _OutOfTime(Exception):
    """The next step might end after TRIAL_S."""


class _NonFinite(Exception):
    """A step's values were NaN or Inf."""


@dataclass(frozen=True)
class Subject:
    """The loaded model."""

    hybrid: HybridModel
    executor: Executor[Any]
    plan: Plan
    vocab: int


@dataclass(frozen=True)
class Measured:
    """seconds[plan][round]: per token, the mean of steps of one request and of several; fewer rounds of a plan that
    could no longer win. over: why the trial ended early, or "". valid: all values were finite. same: co-fetch was not
    compared, as it changes nothing."""

    plans: Sequence[Choices]
    requests: Sequence[int]
    seconds: Sequence[Sequence[float]]
    took_s: float
    over: str = ""
    valid: bool = True
    same: bool = False


class PlanTrial:
    """Made when the model is bound, before its first step: a kept result holds from then on. The rest is `result`."""

    def __init__(self, plan: Plan, spec: Model, formats: Iterable[str], hybrid: HybridModel) -> None:
        """formats: of the experts in RAM."""
        self._plan, self._vocab, self._hybrid = plan, spec.vocab, hybrid
        rates = None if hybrid.co_fetch is None else hybrid.co_fetch.rates
        self._plans = likely(plan, hybrid.able, rates) if plan.trial != "off" and plan.gpu is not None else ()
        self._kept: Kept | None = None
        self._folder, self._not_kept = _folder()
        if len(self._plans) > 1:
            self._key, self._share = key_of(plan, spec, list(formats)), share_in_vram(plan)
            if plan.trial == "auto" and self._folder is not None:
                self._kept = read_kept(self._folder, self._key, self._share)
        if self._kept is not None:
            hybrid.choose(self._kept.choices.within(hybrid.able))

    def result(
        self, executor: Executor[Any], report: Callable[[Loading], None],
        keep_graphs: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter,
    ) -> Decision | None:  # fmt: skip
        """Try the plans unless an earlier start did, and leave the model with the one taken. keep_graphs: drops the
        graphs of the others. Returns the start-up table's row; None if the model has no choice."""
        plan, hybrid = self._plan, self._hybrid
        if plan.trial == "off":
            return Decision(ROW, "off", "off", "as asked") if hybrid.able != NONE else None
        if len(self._plans) < 2:
            return self._one_plan()
        if self._kept is not None:
            why = f"as tried on {self._kept.day}: {self._kept.why}; --plan-trial again tries anew"
            return Decision(ROW, plan.trial, str(hybrid.choices), why)
        if plan.trial == "auto" and plan.gpu is not None and plan.gpu.simulated:
            why = "a simulated GPU is not compared by itself; --plan-trial again does"
            return Decision(ROW, plan.trial, "none", why)
        measured = measure(Subject(hybrid, executor, plan, self._vocab), self._plans, report, clock)
        chosen, why = verdict(measured)
        hybrid.choose(measured.plans[chosen])
        keep_graphs()
        kept = self._keep(why) if measured.valid else "not kept"
        return Decision(ROW, plan.trial, str(hybrid.choices), f"{why}; {kept}")

    def _one_plan(self) -> Decision | None:
        able, asked = self._hybrid.able, self._plan.trial
        if able == NONE:
            why = "co-fetch and read ahead are not possible here, or off as asked"
            return None if asked == "auto" else Decision(ROW, asked, "none", why)
        return Decision(ROW, asked, "none", f"by prediction nothing comes near to {able}")

    def _keep(self, why: str) -> str:
        if self._folder is None:
            return f"not kept: {self._not_kept}"
        now, day = self._hybrid.choices, datetime.now(UTC).date().isoformat()
        kept = Kept(co_fetch=now.co_fetch, read_ahead=now.read_ahead, why=why, share=self._share, day=day)
        refused = keep(self._folder, self._key, kept)
        return f"not kept: {refused}" if refused else "kept for later starts"


def _folder() -> tuple[Path | None, str]:
    """The folder of kept results; without a home folder None, and why."""
    try:
        return read_env().cache / "trials", ""
    except UsageError as error:
        return None, error.message


def with_trial(rows: Sequence[Decision], trial: Decision | None, choices: Choices) -> list[Decision]:
    """The start-up table's rows with that of the trial, if there is one. Those of choices that it turned off say so."""
    if trial is None:
        return list(rows)
    off = {name for name, field in _NAMES.items() if not getattr(choices, field)}
    turned = (row.name in off and row.got == "on" for row in rows)
    why = f"slower in the trial: see {ROW}"
    changed = [replace(row, got="off", why=why) if is_off else row for row, is_off in zip(rows, turned, strict=True)]
    return [*changed, trial]


def measure(
    subject: Subject, plans: Sequence[Choices], report: Callable[[Loading], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:  # fmt: skip
    """Time decode steps under each plan, the first of which is the rule, for at most TRIAL_S. Must run before the first
    request: it writes to the first pages and state slots. Afterwards counters are as before."""
    began_s, number, over, valid, given = clock(), 0, "", True, len(plans)
    seconds: list[list[float]] = [[] for _ in plans]
    steps = _Steps(subject, clock, began_s + TRIAL_S)
    with subject.hybrid.aside():
        try:
            plans = steps.prepare(plans)
            seconds, going = [[] for _ in plans], list(range(len(plans)))
            while len(going) > 1 and number < ROUNDS:
                report(Loading(TRYING, number, ROUNDS))
                for at, took_s in steps.round(plans, going, number).items():
                    seconds[at].append(took_s)
                number += 1
                going = [at for at in going if not at or may_win(seconds[0], seconds[at])]
        except _OutOfTime:
            over = f"after {TRIAL_S:g} s"
        except _NonFinite:
            over, valid = "as values were NaN or Inf", False
        subject.hybrid.choose(plans[0])
    subject.executor.clock.reset()
    return Measured(plans, steps.requests, seconds, clock() - began_s, over, valid, len(plans) < given)


class _Steps:
    """Decode steps of sequences that begin at position 0: nothing is read that was not written here."""

    def __init__(self, subject: Subject, clock: Callable[[], float], end_s: float) -> None:
        self._hybrid, self._executor, self._vocab = subject.hybrid, subject.executor, subject.vocab
        self._clock, self._end_s, self._longest_s = clock, end_s, 0.0
        plan = subject.plan
        self._room = min(plan.num_pages * plan.page_tokens, plan.context_tokens)
        self._pages_each = -(-min(1 + MOST_STEPS, self._room) // plan.page_tokens)
        several = min(FORESEEN_ROWS, plan.max_running, plan.num_pages // self._pages_each)
        self.requests = (1,) if several < 2 else (1, several)
        self._slowest_s = dict.fromkeys(self.requests, 0.0)  # a step, by the number of requests
        self._number = 0

    def prepare(self, plans: Sequence[Choices]) -> Sequence[Choices]:
        """Compute steps of each plan that are not timed: they capture graphs and touch memory for the first time, and
        co-fetch learns the CPU's rate. Returns the plans that differ."""
        self._hybrid.choose(plans[0])
        fetch = self._hybrid.co_fetch
        for _ in range(LEARNING_STEPS if plans[0].co_fetch and fetch is not None else 0):
            self._step(1, 0)
            if fetch is None or any(fetch.shares):
                break
        if fetch is not None and not any(fetch.shares):
            plans = [of for of in plans if of.co_fetch == plans[0].co_fetch]  # on and off are the same here
        for of in plans:
            self._hybrid.choose(of)
            for requests in self.requests:
                step_s = min(self._step(requests, position) for position in (0, 1))
                self._slowest_s[requests] = max(self._slowest_s[requests], step_s)
        return plans

    def round(self, plans: Sequence[Choices], going: Sequence[int], number: int) -> dict[int, float]:
        """Seconds per token of each plan that still takes part, in this round's order: each of them is at each place
        equally often."""
        turned = [going[(number + i) % len(going)] for i in range(len(going))]
        seconds, first = dict[int, float](), self._number
        for at in reversed(turned) if number // len(going) % 2 else turned:
            self._number = first  # the same tokens for all
            self._hybrid.choose(plans[at])
            seconds[at] = sum(map(self._per_token, self.requests)) / len(self.requests)
        return seconds

    def _per_token(self, requests: int) -> float:
        self._step(requests, 0)  # the first step after a change is not timed
        count = max(1, min(MOST_STEPS, int(PART_S / self._slowest_s[requests])))
        return sum(self._step(requests, 1 + i) for i in range(count)) / (count * requests)

    def _step(self, requests: int, position: int) -> float:
        """Compute a step; its seconds. Positions beyond the context are its last one. Raises _OutOfTime before the step
        and _NonFinite after it."""
        began_s, executor = self._clock(), self._executor
        if began_s + self._longest_s > self._end_s:
            raise _OutOfTime
        tokens = [(self._number * requests + i) * _TOKEN_STRIDE % self._vocab for i in range(requests)]
        self._number += 1
        pages = [range(i * self._pages_each, (i + 1) * self._pages_each) for i in range(requests)]
        at = min(position, self._room - 1)
        spans = [Span((token,), at, list(pages[i]), 0, i) for i, token in enumerate(tokens)]
        every = range(requests)
        step = executor.launch(StepBatch(spans, every))
        executor.sample(step, every, [Row(_GREEDY, [token], 1) for token in tokens])
        if executor.wait(step).faults:
            raise _NonFinite
        took_s = self._clock() - began_s
        self._longest_s = max(self._longest_s, took_s)
        return took_s


def wins_needed(rounds: int) -> int:
    """Fewest wins that two equal plans give one of them with a probability of at most CHANCE; more than `rounds` if no
    number does."""
    chances = (sum(comb(rounds, n) for n in range(wins, rounds + 1)) / 2**rounds for wins in range(rounds + 1))
    return next((wins for wins, chance in enumerate(chances) if chance <= CHANCE), rounds + 1)


def may_win(rule: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a plan can still be faster than the rule in enough of ROUNDS rounds. Seconds of the rounds so far."""
    lost = sum(a >= b for a, b in zip(other, rule, strict=True))
    return ROUNDS - lost >= wins_needed(ROUNDS)


def best(seconds: Sequence[Sequence[float]]) -> tuple[int, int, int]:
    """The plan to take; the plan that came nearest to the rule (plan 0) or beat it, and in how many rounds. See CHANCE
    and CLEAR: times of a round are compared with each other only. seconds[plan][round], of two plans or more, of which
    others than the rule may have fewer rounds."""
    rule = seconds[0]
    ratios = {i: [a / b for a, b in zip(of, rule, strict=False)] for i, of in enumerate(seconds) if i}
    wins = {i: sum(ratio < 1 for ratio in of) for i, of in ratios.items()}
    clear = [i for i, of in ratios.items() if wins[i] >= wins_needed(len(of)) and median(of) < CLEAR]
    nearest = min(clear or ratios, key=lambda i: median(ratios[i]))
    return nearest if clear else 0, nearest, wins[nearest]


def verdict(measured: Measured) -> tuple[int, str]:
    """The plan to take, and the reason with its figures."""
    plans, rounds = measured.plans, [len(of) for of in measured.seconds]
    if len(plans) == 1:
        return 0, f"nothing to compare: {_SAME}"
    over = f", which ended {measured.over}" if measured.over else ""
    if not rounds[0]:
        return 0, f"nothing was compared in the trial{over}"
    chosen, nearest, wins = best(measured.seconds)
    medians = [format_ms(median(of)) for of in measured.seconds]
    others = [f"{medians[i]} with {plans[i]}" for i in range(len(plans)) if i != chosen]
    per = "per token" if len(measured.requests) == 1 else f"per token, mean of 1 and {measured.requests[1]} requests,"
    found = f"{medians[chosen]} {per} against {' and '.join(others)}"
    won = f"faster than the rule in {wins} of {rounds[nearest]} rounds"
    if not chosen:
        needed = f"{wins_needed(ROUNDS)} of {ROUNDS} are needed"
        won = f"{plans[nearest]} is not clearly faster: in {wins} of {rounds[nearest]} rounds, {needed}"
    same = f"; {_SAME}" if measured.same else ""
    return chosen, f"{found}; {won}{over}, {format_duration(measured.took_s)}{same}"
