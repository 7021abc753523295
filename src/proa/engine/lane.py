"""The prefill lane: a prefill step is computed a few blocks at a time between decode steps, so that decode never stalls
for a whole prefill step. Belongs here: how many blocks are due. Never: choosing a step's tokens, devices.

One stream computes both in turns, and a turn ends after a whole block: the two never run at the same time, so they
share workspace, doorbell and CPU workers (docs/decisions/038).
"""

from __future__ import annotations

import sys

from proa.engine.runner import Flight, Runner
from proa.engine.scheduling.step_plan import StepPlan

MOST_BLOCK_S = 0.05  # longest stall of decode: one prefill block
LEAST_TOKENS = 512  # least size of a prefill step beside decode
GRAIN_TOKENS = 256  # steps of fewer tokens are not used to estimate speed: reading weights takes all their time


class Turns:
    """Computes how many prefill blocks are due, so that they take the fraction `share` of the time."""

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"the share of prefill is {share}, but must be between 0 and 1")
        self._ratio, self._due = share / (1 - share), 0.0

    def due(self, step_s: float, block_s: float) -> int:
        """Blocks due after a decode step, given the durations of both. A block that takes longer than its share of one
        step is due after several steps."""
        if not step_s or not block_s:
            return 1  # not measured yet: run one block
        self._due += self._ratio * step_s / block_s
        blocks = int(self._due)
        self._due -= blocks
        return blocks


def fitting_tokens(tokens: int, block_s: float) -> int:
    """The number of tokens at which a block takes MOST_BLOCK_S, given that `tokens` took block_s."""
    fitting = int(tokens * MOST_BLOCK_S / block_s)
    return max(LEAST_TOKENS, fitting - fitting % GRAIN_TOKENS)


class NoLane:
    """No lane: prefill and decode share steps (ordinary chunked prefill)."""

    most_tokens: int | None = None  # no limit of prefill tokens beside that of the step

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
    """Holds at most one step. All calls come from one thread."""

    def __init__(self, runner: Runner, share: float) -> None:
        self._runner, self._turns = runner, Turns(share)
        self.most_tokens: int | None = LEAST_TOKENS  # limit of the next prefill step, in the lane or not
        self._blocks = len(runner.executor.spec.blocks)
        self._flight: Flight | None = None
        self._done = False

    def launch(self, plan: StepPlan | None) -> None:
        """Put a step into the lane, unless it is there already."""
        if plan is not None and (self._flight is None or plan is not self._flight.plan):
            self._flight, self._done = self._runner.launch(plan, in_parts=True), False

    def turn(self) -> None:
        """Compute the blocks that are due. Called after a decode step was launched."""
        if self._flight is not None and not self._done:
            blocks = self._turns.due(*self._runner.executor.pace())
            if blocks:
                self._done = self._runner.advance(self._flight, blocks)

    def take(self) -> Flight | None:
        """Remove and return the step if all its blocks are computed; else None."""
        if self._flight is None or not self._done:
            return None
        flight, self._flight = self._flight, None
        self.learn(flight, self._runner.executor.pace().block_s * self._blocks)
        return flight

    def learn(self, flight: Flight, seconds: float) -> None:
        """Adapt most_tokens to a prefill step that took this long; 0: unknown."""
        plan = flight.plan
        if seconds and plan.items[-1].num_tokens > 1 and plan.num_tokens >= GRAIN_TOKENS:
            self.most_tokens = fitting_tokens(plan.num_tokens, seconds / self._blocks)

    def finish(self) -> None:
        """Compute all blocks that are left. Called when no request decodes."""
        if self._flight is not None and not self._done:
            self._done = self._runner.advance(self._flight, sys.maxsize)

    def cancel(self) -> None:
        """Discard the step in the lane."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._runner.cancel(flight)
