"""Prefill in turns: a prefill step is computed a few blocks at a time between decode steps, so that decode never stalls
for a whole prefill step. Never: how many blocks are due (machine/cost/turns.py), choosing a step's tokens, devices.

One stream computes both, and a turn of prefill ends after a whole block: decode and prefill never run at the same time,
so they share workspace, doorbell and CPU workers (docs/decisions/038).
"""

from __future__ import annotations

from proa.engine.runner import Flight, Runner
from proa.engine.scheduling.step_plan import StepPlan
from proa.machine.cost.turns import GRAIN_TOKENS, LEAST_TOKENS, blocks_alone, blocks_due, fitting_tokens


class NoTurns:
    """Prefill and decode share steps (ordinary chunked prefill)."""

    most_tokens: int | None = None  # no limit of prefill tokens beside that of the step

    def launch(self, plan: StepPlan | None) -> None:
        pass

    def prefill(self) -> None:
        pass

    def take(self) -> Flight | None:
        return None

    def learn(self, flight: Flight, seconds: float) -> None:
        pass

    def finish(self) -> None:
        pass

    def progress(self) -> tuple[StepPlan, float] | None:
        return None

    def cancel(self) -> None:
        pass


class PrefillTurns:
    """Holds at most one prefill step. All calls come from one thread."""

    def __init__(self, runner: Runner, share: float, *, passes: bool = False) -> None:
        """share: fraction of the time for prefill. passes: prefill steps are as long as the plan allows, since their
        blocks are computed in chunks. Raises ValueError if the share is not between 0 and 1."""
        if not 0 < share < 1:
            raise ValueError(f"the share of prefill is {share}, but must be between 0 and 1")
        self._runner, self._share, self._owed = runner, share, 0.0
        self.most_tokens: int | None = None if passes else LEAST_TOKENS  # limit of the next prefill step
        self._blocks = len(runner.executor.spec.blocks)
        self._flight: Flight | None = None
        self._done = False

    def launch(self, plan: StepPlan | None) -> None:
        """Hold this prefill step from now on, unless it is held already."""
        if plan is not None and (self._flight is None or plan is not self._flight.plan):
            self._flight, self._done = self._runner.launch(plan, in_parts=True), False

    def prefill(self) -> None:
        """Compute the blocks that are due. Called after a decode step was launched."""
        if self._flight is not None and not self._done:
            blocks, self._owed = blocks_due(self._share, self._owed, *self._runner.executor.pace())
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
        if self.most_tokens is None or not seconds:
            return
        if plan.items[-1].num_tokens > 1 and plan.num_tokens >= GRAIN_TOKENS:
            self.most_tokens = fitting_tokens(plan.num_tokens, seconds / self._blocks)

    def finish(self) -> None:
        """Compute blocks for about 0.1 s (blocks_alone), or all that are left. Called when no request decodes. New
        requests and cancellations are seen in between."""
        if self._flight is not None and not self._done:
            block_s = self._runner.executor.pace().block_s
            self._done = self._runner.advance(self._flight, blocks_alone(block_s))

    def progress(self) -> tuple[StepPlan, float] | None:
        """The held step, if some of its blocks are computed and some are not, and the fraction that is."""
        if self._flight is None or self._done:
            return None
        share = self._runner.done_share(self._flight)
        return (self._flight.plan, share) if share else None

    def cancel(self) -> None:
        """Discard the held step."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._runner.cancel(flight)
