"""The prompts' lane: a step that is computed a few blocks of the model at a time, between steps of those who decode, so
that none of these waits for all of it. Belongs here: whose turn it is. Never: what is in a step, devices.

One stream computes both, in turns: nothing of one runs beside anything of the other, so they share work space, doorbell
and the CPU's workers, and a turn ends where a block does. docs/decisions/038.
"""

from __future__ import annotations

import sys

from proa.engine.runner import Runner
from proa.engine.step_plan import StepPlan

MOST_BLOCK_S = 0.05  # that those who decode shall wait for a block, and messages for so many of these as there are
LEAST_TOKENS, GRAIN_TOKENS = (
    512,
    256,
)  # of a step that others wait for; fewer tell nothing of its speed: all wait for weights


class Turns:
    """How many blocks are due, so that they take `share` of the time."""

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"{share} is no share of the time that leaves some to others")
        self._ratio, self._due = share / (1 - share), 0.0

    def due(self, step_s: float, block_s: float) -> int:
        """Behind a step of so many seconds. Where a block takes longer than its share, it waits for more steps."""
        if not step_s or not block_s:
            return 1  # to see how long it takes
        self._due += self._ratio * step_s / block_s
        blocks = int(self._due)
        self._due -= blocks
        return blocks


def fitting_tokens(tokens: int, block_s: float) -> int:
    """How many tokens a step may have so that a block takes MOST_BLOCK_S, where one of so many took block_s."""
    fitting = int(tokens * MOST_BLOCK_S / block_s)
    return max(LEAST_TOKENS, fitting - fitting % GRAIN_TOKENS)


class Lane:
    """At most one step is in it. One thread calls."""

    def __init__(self, runner: Runner, share: float) -> None:
        self._runner, self._turns = runner, Turns(share)
        self.most_tokens = LEAST_TOKENS  # of the next step with prompts, in the lane or alone
        self._blocks = len(runner.executor.spec.blocks)
        self._plan: StepPlan | None = None
        self._done = False

    def begin(self, plan: StepPlan | None) -> None:
        """The step that is to be in the lane; it may be there already."""
        if plan is not None and plan is not self._plan:
            self._runner.begin(plan)
            self._plan, self._done = plan, False

    def turn(self) -> None:
        """Behind a step of those who decode: what is due now."""
        if self._plan is not None and not self._done:
            blocks = self._turns.due(*self._runner.in_parts.turns_s())
            if blocks:
                self._done = self._runner.in_parts.advance(blocks)

    def take(self) -> StepPlan | None:
        """The step, if it is done: it is the runner's last one now, and the lane is free."""
        if self._plan is None or not self._done:
            return None
        plan, self._plan = self._plan, None
        self.learn(plan, self._runner.in_parts.turns_s()[1] * self._blocks)
        self._runner.end(plan)
        return plan

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """All of this step took so long, if it has prompts; 0: nobody knows."""
        if seconds and plan.items[-1].num_tokens > 1 and plan.num_tokens >= GRAIN_TOKENS:
            self.most_tokens = fitting_tokens(plan.num_tokens, seconds / self._blocks)

    def finish(self) -> None:
        """Nobody decodes: all that is left is due."""
        if self._plan is not None and not self._done:
            self._done = self._runner.in_parts.advance(sys.maxsize)

    def drop(self) -> None:
        """Nobody wants what is in the lane."""
        if self._plan is not None:
            self._plan = None
            self._runner.in_parts.drop()
