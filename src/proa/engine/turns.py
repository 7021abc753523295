"""Prefill in turns: a prefill step is computed a few blocks at a time between decode steps, so that decode never stalls
for a whole prefill step. A step of short prompts may overtake a long one. Never: how many blocks are due
(machine/cost/turns.py), choosing a step's tokens, devices.

A turn of prefill ends after a whole block. In turns decode and prefill never run at the same time, so they share
workspace, doorbell and CPU workers (docs/decisions/038). A prefill step that leaves the CPU to decode runs beside
decode steps instead (docs/decisions/069), as long as the gaps between them keep to the limit.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from proa.engine.runner import Flight, Runner
from proa.engine.scheduling.step_plan import StepPlan
from proa.machine.cost.turns import (
    AIMED_SHARE,
    ALONE_BLOCK_S,
    FIRST_TOKENS,
    LEAST_ALLOWANCE,
    LEAST_TOKENS,
    GapLimit,
    blocks_alone,
    blocks_due,
    fitting_tokens,
    left_s,
    overtaking_tokens,
)
from proa.obs.units import format_ms

log = logging.getLogger(__name__)

STEPS = 5  # the undisturbed gap is the median of this many decode steps
_SAID_AFTER = 8  # turns with blocks that do not fit, after which the log says so
# A prefill step some of whose requests were aborted is given up if the others need at most this share of the tokens
# that are left of it. They are computed anew, in a step that also reads weights or copies experts again.
GIVE_UP_SHARE = 0.25
MOST_OVER = 3  # gaps beyond the limit, after which a prefill step beside decode steps goes on in turns with them


class NoTurns:
    """Prefill and decode share steps (ordinary chunked prefill), so there is nothing to do."""

    most_tokens: int | None = None  # no limit of prefill tokens beside that of the step
    limit_s = 0.0
    busy = False
    meanwhile: Callable[[], None] | None = None
    given_up = 0

    def short_tokens(self) -> int:
        return 0

    def launch(self, *plans: StepPlan | None) -> None:
        pass

    def prefill(self) -> None:
        pass

    def take(self) -> Flight | None:
        return None

    def finish(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def progress(self) -> list[tuple[StepPlan, float]]:
        return []

    def should_give_up(self, plan: StepPlan, tokens_again: int) -> bool:
        return False

    def cancel(self, plan: StepPlan | None = None) -> None:
        pass


class PrefillTurns:
    """Holds at most two prefill steps: a step, and one that overtakes it, which is computed first. All calls come from
    one thread."""

    def __init__(
        self, runner: Runner, limit: GapLimit, *, fixed: bool = False, over_tokens: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """fixed: prefill steps are as long as the plan allows, in chunks of its size, whatever time these take.
        over_tokens: most tokens of a step that overtakes. Raises ValueError for a limit that leaves no time for
        prefill."""
        if limit.factor <= 1 and limit.seconds <= 0:
            raise ValueError(f"{limit} leaves no time for prefill: the factor must be above 1, or the time positive")
        self._runner, self._limit, self._owed = runner, limit, 0.0
        self._fixed = fixed
        self._held: list[Flight] = []  # the last one is computed
        self._done = False  # the last one is computed whole
        self._steps = deque[float](maxlen=STEPS)  # seconds of the last decode steps
        self._decoding = False  # requests decode
        self._learned: tuple[int, float] | None = None  # tokens and seconds of a block of a prefill step
        self._notices = _Notices(limit)
        self._beside = _Beside()
        self._over_tokens, self._clock = over_tokens, clock
        self._over_token_s = self._over_s = 0.0  # of the last step that overtook: time per token, and in all
        self._over_end_s = -float("inf")

    @property
    def busy(self) -> bool:
        """Whether a prefill step is being computed."""
        return bool(self._held)

    @property
    def limit_s(self) -> float:
        """Longest gap between two decode steps now; 0: not known yet."""
        return self._limit.longest_s(self._step_s)

    @property
    def given_up(self) -> int:
        """Prefill steps so far that ran beside decode steps until gaps exceeded the limit."""
        return self._beside.given_up

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """To be called again and again while a decode step is computed; None: prefill is in turns with it."""
        return self._keep_ahead if self._runs_beside else None

    @property
    def _runs_beside(self) -> bool:
        """Whether the held step is computed beside decode steps now. The undisturbed gap must be known."""
        if len(self._held) != 1 or not self._decoding or not self._steps or self._beside.exceeded:
            return False
        return self._runner.runs_beside(self._held[0])

    def _keep_ahead(self) -> None:
        self._done = self._done or self._runner.keep_ahead(self._held[0])

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the next prefill step: as many as let a block fit between two decode steps. None: the plan
        fixes it."""
        if self._fixed:
            return None
        beside = self._decoding and self._step_s > 0
        least = LEAST_TOKENS if beside else FIRST_TOKENS
        if self._learned is None:
            return least
        return fitting_tokens(*self._learned, AIMED_SHARE * self._allowance_s if beside else ALONE_BLOCK_S, least)

    @property
    def _step_s(self) -> float:
        """Seconds of a decode step; 0: not known yet."""
        return median(self._steps) if self._steps else 0.0

    @property
    def _allowance_s(self) -> float:
        return self._limit.allowance_s(self._step_s)

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
                self._held.append(self._launched(plan))
                self._done = False

    def _launched(self, plan: StepPlan) -> Flight:
        if self._held:
            return self._runner.launch_in_parts(plan)
        self._beside.begin()
        step_s, allowance_s = self._step_s, self._allowance_s
        share = allowance_s / (allowance_s + step_s) if self._decoding and step_s else 0.0
        return self._runner.launch_in_parts(plan, share)

    def prefill(self) -> None:
        """Compute the blocks that are due. Called after a decode step was launched."""
        self._decoding = True
        if self._runs_beside:
            if self._beside.exceeds(self._clock(), self.limit_s):
                self._notices.give_up(self.limit_s)
            else:
                self._keep_ahead()
                return
        self._beside.interrupt()
        step_s, block_s = self._runner.executor.pace()
        if step_s:
            self._steps.append(step_s)
        if self._held and not self._done:
            block_s = block_s if self._steps else 0.0
            blocks, self._owed = blocks_due(self._allowance_s, self._owed, block_s)
            if len(self._held) == 1 and (self._fixed or self._held[0].plan.num_tokens <= LEAST_TOKENS):
                self._notices.check(self._step_s, block_s)
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
            self._learn(flight.plan.num_tokens, self._runner.executor.pace().block_s)
        return flight

    def _learn(self, tokens: int, block_s: float) -> None:
        """Note the time of a block of a prefill step; 0: unknown. A short step would underestimate the speed: reading
        weights takes most of its time."""
        if block_s and 2 * tokens >= (self.most_tokens or 0):
            self._learned = tokens, block_s

    def finish(self) -> None:
        """Compute blocks for about ALONE_S (blocks_alone), or all that are left, so that new requests and cancellations
        are seen soon. Called when no request decodes."""
        self.rest()
        if self._held and not self._done:
            block_s = self._runner.executor.pace().block_s
            self._done = self._runner.advance(self._held[-1], blocks_alone(block_s))

    def rest(self) -> None:
        """Note that no request decodes any more: the next prefill step need not fit between decode steps."""
        self._decoding = False
        self._beside.interrupt()

    def progress(self) -> list[tuple[StepPlan, float]]:
        """The held steps of which some blocks are computed and some are not, and the fraction that is."""
        held = self._held[:-1] if self._done else self._held
        shares = [(flight.plan, self._runner.done_share(flight)) for flight in held]
        return [(plan, share) for plan, share in shares if share]

    def should_give_up(self, plan: StepPlan, tokens_again: int) -> bool:
        """Whether a held step should be given up, because some of its requests were aborted and the others end sooner
        in a new one. tokens_again: that these others would compute there."""
        flight = next(flight for flight in self._held if flight.plan is plan)
        left = 0.0 if self._done and flight is self._held[-1] else 1 - self._runner.done_share(flight)
        return not tokens_again or tokens_again <= GIVE_UP_SHARE * left * plan.num_tokens

    def cancel(self, plan: StepPlan | None = None) -> None:
        """Discard the held step with this plan; None: all."""
        dropped = [flight for flight in self._held if plan is None or flight.plan is plan]
        self._done = self._done and self._held[-1] not in dropped
        self._held = [flight for flight in self._held if flight not in dropped]
        for flight in dropped:
            self._runner.cancel(flight)


class _Beside:
    """The gaps between decode steps while a prefill step runs beside them. exceeded: too many were longer than the
    limit, so that the step goes on in turns."""

    def __init__(self) -> None:
        self.exceeded, self.given_up = False, 0
        self._over, self._last_s = 0, 0.0

    def begin(self) -> None:
        """Start anew for another prefill step."""
        self.exceeded, self._over, self._last_s = False, 0, 0.0

    def interrupt(self) -> None:
        """Do not count the next gap: it begins in a turn of prefill, or no request decodes."""
        self._last_s = 0.0

    def exceeds(self, now_s: float, limit_s: float) -> bool:
        """Note a decode step. limit_s: the longest gap."""
        self._over += 0 < self._last_s < now_s - limit_s
        self._last_s = now_s
        if self._over >= MOST_OVER:
            self.exceeded = True
            self.given_up += 1
        return self.exceeded


class _Notices:
    """Says in the log, once each, that the limit cannot be kept, and why."""

    def __init__(self, limit: GapLimit) -> None:
        self._limit, self._long_turns, self._said_step = limit, 0, False
        self._said_beside = False

    def give_up(self, limit_s: float) -> None:
        """Say that gaps were too long beside a prefill step."""
        if not self._said_beside:
            self._said_beside = True
            log.warning(
                "A prompt computed beside decode steps made %d gaps longer than --max-itl, %s. It goes on in turns "
                "with them. proa_prefill_beside_given_up counts such prompts; a larger --max-itl avoids that.",
                MOST_OVER, format_ms(limit_s),
            )  # fmt: skip

    def check(self, step_s: float, block_s: float) -> None:
        """Called for each turn of a prefill step that cannot be shorter. Durations of a decode step and of a block; 0:
        unknown."""
        if not step_s or not block_s:
            return
        if not self._said_step and not self._limit.factor and self._limit.seconds <= step_s:
            self._said_step = True
            log.warning(
                "--max-itl is %s, but a decode step takes %s without a prompt beside it. Prompts get %.0f %% of its "
                "time, and gaps are longer. Raise --max-itl, or give a factor such as 2.5x.",
                format_ms(self._limit.seconds), format_ms(step_s), 100 * LEAST_ALLOWANCE,
            )  # fmt: skip
        allowance_s = self._limit.allowance_s(step_s)
        self._long_turns += block_s > allowance_s
        if self._long_turns == _SAID_AFTER and block_s > allowance_s:
            self._long_turns += 1
            log.warning(
                "One layer of a prompt takes %s, longer than the %s that --max-itl leaves beside a decode step of %s. "
                "One is computed after every %.1f decode steps, so that only the mean of the gaps is within the limit. "
                "--max-itl %.1fx would keep every gap within it.",
                format_ms(block_s), format_ms(allowance_s), format_ms(step_s), block_s / allowance_s,
                math.ceil(10 * (1 + block_s / step_s)) / 10,
            )  # fmt: skip
