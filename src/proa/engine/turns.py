"""Prefill in turns: a prefill step is computed a few blocks at a time between decode steps, so that decode never stalls
for a whole prefill step. A step of short prompts may overtake a long one. Never: how many blocks are due
(machine/cost/turns.py), choosing a step's tokens, devices.

One stream computes both, and a turn of prefill ends after a whole block: decode and prefill never run at the same time,
so they share workspace, doorbell and CPU workers (docs/decisions/038).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from proa.engine.runner import Flight, Runner
from proa.engine.scheduling.step_plan import StepPlan
from proa.machine.cost.turns import (
    GRAIN_TOKENS,
    LEAST_TOKENS,
    blocks_alone,
    blocks_due,
    fitting_tokens,
    left_s,
    overtaking_tokens,
)


class NoTurns:
    """Prefill and decode share steps (ordinary chunked prefill)."""

    most_tokens: int | None = None  # no limit of prefill tokens beside that of the step

    def short_tokens(self) -> int:
        return 0

    def launch(self, *plans: StepPlan | None) -> None:
        pass

    def prefill(self) -> None:
        pass

    def take(self) -> Flight | None:
        return None

    def learn(self, flight: Flight, seconds: float) -> None:
        pass

    def finish(self) -> None:
        pass

    def progress(self) -> list[tuple[StepPlan, float]]:
        return []

    def cancel(self, plan: StepPlan | None = None) -> None:
        pass


class PrefillTurns:
    """Holds at most two prefill steps: a step, and one that overtakes it, which is computed first. All calls come from
    one thread."""

    def __init__(
        self, runner: Runner, share: float, *, passes: bool = False, over_tokens: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """share: fraction of the time for prefill. passes: prefill steps are as long as the plan allows, since their
        blocks are computed in chunks. over_tokens: most tokens of a step that overtakes. Raises ValueError if the share
        is not between 0 and 1."""
        if not 0 < share < 1:
            raise ValueError(f"the share of prefill is {share}, but must be between 0 and 1")
        self._runner, self._share, self._owed = runner, share, 0.0
        self.most_tokens: int | None = None if passes else LEAST_TOKENS  # limit of the next prefill step
        self._blocks = len(runner.executor.spec.blocks)
        self._held: list[Flight] = []  # the last one is computed
        self._done = False  # the last one is computed whole
        self._over_tokens, self._clock = over_tokens, clock
        self._over_token_s = self._over_s = 0.0  # of the last step that overtook: time per token, and in all
        self._over_end_s = -float("inf")

    def short_tokens(self) -> int:
        """Most tokens of a step that may overtake the held one now; 0: none may, because it ends soon, or has not been
        computed for as long as the last one that overtook it."""
        if len(self._held) != 1 or self._done or self._clock() - self._over_end_s < self._over_s:
            return 0
        flight = self._held[0]
        expected_s = left_s(flight.age_s(), self._runner.done_share(flight), flight.plan.num_tokens)
        return overtaking_tokens(self._over_tokens, expected_s, self._over_token_s)

    def launch(self, *plans: StepPlan | None) -> None:
        """Hold these prefill steps from now on, unless they are held already. A later one overtakes."""
        for plan in plans:
            if plan is not None and all(plan is not flight.plan for flight in self._held):
                self._held.append(self._runner.launch(plan, in_parts=True))
                self._done = False

    def prefill(self) -> None:
        """Compute the blocks that are due. Called after a decode step was launched."""
        if self._held and not self._done:
            blocks, self._owed = blocks_due(self._share, self._owed, *self._runner.executor.pace())
            if blocks:
                self._done = self._runner.advance(self._held[-1], blocks)

    def take(self) -> Flight | None:
        """Remove and return the step that is computed whole, if there is one."""
        if not self._done:
            return None
        flight, self._done = self._held.pop(), False
        if self._held:
            self._over_end_s, self._over_s = self._clock(), flight.age_s()
            self._over_token_s = self._over_s / flight.plan.num_tokens
        else:
            self.learn(flight, self._runner.executor.pace().block_s * self._blocks)
        return flight

    def learn(self, flight: Flight, seconds: float) -> None:
        """Adapt most_tokens to a prefill step that took this long; 0: unknown."""
        plan = flight.plan
        if self.most_tokens is None or not seconds:
            return
        if plan.items[-1].num_tokens > 1 and plan.num_tokens >= GRAIN_TOKENS:
            self.most_tokens = fitting_tokens(plan.num_tokens, seconds / self._blocks)

    def finish(self) -> None:
        """Compute blocks for about 0.1 s (blocks_alone), or all that are left. Called when no request decodes. New
        requests and cancellations are seen in between."""
        if self._held and not self._done:
            block_s = self._runner.executor.pace().block_s
            self._done = self._runner.advance(self._held[-1], blocks_alone(block_s))

    def progress(self) -> list[tuple[StepPlan, float]]:
        """The held steps of which some blocks are computed and some are not, and the fraction that is."""
        held = self._held[:-1] if self._done else self._held
        shares = [(flight.plan, self._runner.done_share(flight)) for flight in held]
        return [(plan, share) for plan, share in shares if share]

    def cancel(self, plan: StepPlan | None = None) -> None:
        """Discard the held step with this plan; None: all."""
        dropped = [flight for flight in self._held if plan is None or flight.plan is plan]
        self._done = self._done and self._held[-1] not in dropped
        self._held = [flight for flight in self._held if flight not in dropped]
        for flight in dropped:
            self._runner.cancel(flight)
