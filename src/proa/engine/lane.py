"""The prefill lane: a step with prompts is computed a few blocks at a time between decode steps, so that decode never
waits for all of it. Belongs here: how many blocks are due. Never: what is in a step, devices.

One stream computes both in turns, and a turn ends behind a block: the two never run at the same time, so they share
workspace, doorbell and CPU workers (docs/decisions/038).
"""

from __future__ import annotations

import sys

from proa.engine.runner import Flight, Runner
from proa.engine.scheduling.step_plan import StepPlan

MOST_BLOCK_S = 0.05  # longest stall of decode: one prefill block
LEAST_TOKENS = 512  # of a prefill step beside decode
GRAIN_TOKENS = 256  # fewer tokens say nothing about the speed: reading weights takes all the time


class Turns:
    """How many prefill blocks are due, so that they take `share` of the time."""

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"{share} is no share of the time that leaves some to others")
        self._ratio, self._due = share / (1 - share), 0.0

    def due(self, step_s: float, block_s: float) -> int:
        """Blocks due after a decode step. A block that takes longer than its share is due after several steps."""
        if not step_s or not block_s:
            return 1  # to measure it
        self._due += self._ratio * step_s / block_s
        blocks = int(self._due)
        self._due -= blocks
        return blocks


def fitting_tokens(tokens: int, block_s: float) -> int:
    """The number of tokens at which a block takes MOST_BLOCK_S, given that `tokens` took block_s."""
    fitting = int(tokens * MOST_BLOCK_S / block_s)
    return max(LEAST_TOKENS, fitting - fitting % GRAIN_TOKENS)


class NoLane:
    """Prompts and decode share steps."""

    most_tokens: int | None = None  # of a step with prompts: as many as fit

    def launch(self, plan: StepPlan | None) -> None:
        pass

    def turn(self) -> None:
        pass

    def take(self) -> Flight | None:
        return None

    def learn(self, flight: Flight, seconds: float) -> None:
        pass

    def finish(self) -> None:
        pass

    def cancel(self) -> None:
        pass


class Lane:
    """At most one step is in it. One thread calls."""

    def __init__(self, runner: Runner, share: float) -> None:
        self._runner, self._turns = runner, Turns(share)
        self.most_tokens: int | None = LEAST_TOKENS  # of the next step with prompts, in the lane or alone
        self._blocks = len(runner.executor.spec.blocks)
        self._flight: Flight | None = None
        self._done = False

    def launch(self, plan: StepPlan | None) -> None:
        """Put a step into the lane; it may be there already."""
        if plan is not None and (self._flight is None or plan is not self._flight.plan):
            self._flight, self._done = self._runner.launch(plan, in_parts=True), False

    def turn(self) -> None:
        """After a decode step was launched: compute the blocks that are due."""
        if self._flight is not None and not self._done:
            blocks = self._turns.due(*self._runner.executor.pace())
            if blocks:
                self._done = self._runner.advance(self._flight, blocks)

    def take(self) -> Flight | None:
        """The step, once it is computed; the lane is free then."""
        if self._flight is None or not self._done:
            return None
        flight, self._flight = self._flight, None
        self.learn(flight, self._runner.executor.pace().block_s * self._blocks)
        return flight

    def learn(self, flight: Flight, seconds: float) -> None:
        """A step with prompts took this long; 0: unknown."""
        plan = flight.plan
        if seconds and plan.items[-1].num_tokens > 1 and plan.num_tokens >= GRAIN_TOKENS:
            self.most_tokens = fitting_tokens(plan.num_tokens, seconds / self._blocks)

    def finish(self) -> None:
        """No request decodes: compute all blocks that are left."""
        if self._flight is not None and not self._done:
            self._done = self._runner.advance(self._flight, sys.maxsize)

    def cancel(self) -> None:
        """Discard the step in the lane."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._runner.cancel(flight)
