"""Which of the pool's workers take part in a step. Belongs here: trying several numbers of them on the loaded model.
Never: placing them.

A step of few tokens reads weights, and memory is often busy before all cores are; one core may be slower than others,
or two may be one. So decode is tried with several numbers of workers, on the model's own step: its weights where they
lie now, its small operations and its waiting are what a buffer read at full speed would not show. Longer steps compute,
with all workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from proa.native.pool import Pool
from proa.types import Decision

TRIALS_S = 0.25  # for all trials together, beside two steps that tell how long one takes
ROUNDS = 5
CLEAR = 0.98  # a gain counts where the median of its times is below this part of the best with all workers,
STEADY = 1.25  # and all workers' own times are no more than this apart: their median from their best
SAVING = 1.1  # how much longer a step may take to save power


class Crew:
    """The CPUs of each team that work in steps of few tokens, and in longer ones. The calling thread is one of them."""

    def __init__(self, pool: Pool, everybody: Sequence[int]) -> None:
        self._pool = pool
        self.few = self.many = tuple(everybody)
        self._now: tuple[int, ...] = ()

    def call(self, *, few: bool) -> None:
        """Those for the next step work from now on, the others sleep."""
        wanted = self.few if few else self.many
        if wanted != self._now:
            self._pool.use((wanted[0] - 1, *wanted[1:]))
            self._now = wanted


@dataclass(frozen=True)
class Trial:
    """A number of workers and the seconds that it took for the same work, round by round."""

    workers: int
    seconds: tuple[float, ...]


def choose_few(
    crew: Crew,
    trials: Sequence[tuple[int, ...]],
    step: Callable[[int, float], None],
    *,
    saving: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Decision | None:
    """Set `crew.few` to the best of `trials`, the first of which is the rule; None if there is nothing to choose.

    step(i, share): the first `share` of a step of one token, which differs with i.
    """
    if len(trials) < 2:
        return None

    def seconds_of(counts: tuple[int, ...], steps: range, share: float) -> float:
        crew.few = counts
        crew.call(few=True)
        begin = clock()
        for i in steps:
            step(i, share)
        return clock() - begin

    whole_s = min(seconds_of(trials[0], range(1), 1.0) for _ in range(2))  # the first touches memory
    each_s = TRIALS_S / (ROUNDS * len(trials))
    share, steps = min(1.0, each_s / whole_s), max(1, int(each_s / whole_s))
    seconds: list[list[float]] = [[] for _ in trials]
    for turn in range(ROUNDS):  # all in turn, so that what else runs here does not decide
        for counts, took in zip(trials, seconds, strict=True):
            took.append(seconds_of(counts, range(turn * steps, (turn + 1) * steps), share) / steps)
    measured = [Trial(sum(counts), tuple(took)) for counts, took in zip(trials, seconds, strict=True)]
    chosen, why = best(measured, saving=saving)
    crew.few = trials[chosen]
    what = "one-token steps" if share == 1 else f"the first {share:.0%} of one-token steps"
    got = f"{measured[chosen].workers} of {measured[0].workers}"
    return Decision("threads for decode", "auto", got, f"{why}; {what}: {_times(measured)}")


def best(trials: Sequence[Trial], *, saving: bool = False) -> tuple[int, str]:
    """Which trial to follow, and why. The first, unless another is clearly faster and the first's times agree."""
    rule = min(trials[0].seconds)
    if median(trials[0].seconds) > STEADY * rule:
        return 0, "times vary more than the numbers of workers can tell"
    medians = [median(trial.seconds) for trial in trials]
    faster = [i for i in range(1, len(trials)) if medians[i] < CLEAR * rule]
    chosen = min(faster, key=lambda i: medians[i], default=0)
    why = "the fastest" if faster else "no other number is clearly faster"
    if saving:
        enough = [i for i, trial in enumerate(trials) if median(trial.seconds) <= SAVING * medians[chosen]]
        fewest = min(enough, key=lambda i: trials[i].workers)
        if trials[fewest].workers < trials[chosen].workers:
            return fewest, "the fewest that lose a tenth at most"
    return chosen, why


def _times(trials: Sequence[Trial]) -> str:
    """The best time of each, most workers first."""
    ordered = sorted(trials, key=lambda trial: -trial.workers)
    return ", ".join(f"{trial.workers} take {min(trial.seconds) * 1e3:.2f} ms" for trial in ordered)
