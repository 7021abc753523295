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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from proa.machine.claims import CpuClaim
from proa.native.pool import Pool
from proa.types import Decision

TRIALS_S = 0.25  # for all trials together, beside two steps that tell how long one takes
ROUNDS = 5
CLEAR = 0.98  # a gain counts where the median of its times is below this part of the best with all workers,
STEADY = 1.25  # and all workers' own times are no more than this apart: their median from their best,
DISTURBED = 0.1  # and threads were ready, but had no core, for less than this part of the time
SAVING = 1.1  # how much longer a step may take to save power


class Crew:
    """The CPUs of each team that work in steps of few tokens, and in longer ones. The calling thread is one of them."""

    def __init__(self, pool: Pool, everybody: Sequence[int], claim: CpuClaim | None = None) -> None:
        self._pool, self._claim = pool, claim  # which stands as long as the crew
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
    """A number of workers and the seconds that they took for the same work, round by round."""

    workers: int
    seconds: tuple[float, ...]


def waited_s() -> float:
    """Seconds for which threads of this process were ready to run and had no core; 0 where the kernel does not say."""
    waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def choose_few(
    crew: Crew,
    trials: Sequence[tuple[int, ...]],
    step: Callable[[int, float], None],
    *,
    saving: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    waited: Callable[[], float] = waited_s,
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
    waited_before = waited()
    for turn in range(ROUNDS):  # all in turn, so that what else runs here does not decide
        for counts, took in zip(trials, seconds, strict=True):
            took.append(seconds_of(counts, range(turn * steps, (turn + 1) * steps), share))
    wanted_s = sum(sum(counts) * sum(took) for counts, took in zip(trials, seconds, strict=True))
    disturbed = (waited() - waited_before) / wanted_s
    measured = [Trial(sum(c), tuple(s / steps for s in took)) for c, took in zip(trials, seconds, strict=True)]
    chosen, why = best(measured, disturbed=disturbed, saving=saving)
    crew.few = trials[chosen]
    what = "one-token steps" if share == 1 else f"the first {share:.0%} of one-token steps"
    got, rule = measured[chosen].workers, measured[0].workers
    told = f"{got} of {rule}" if got <= rule else f"{got}: SMT siblings beside the {rule}"
    return Decision("threads for decode", "auto", told, f"{why}; {what}: {_times(measured)}")


def best(trials: Sequence[Trial], *, disturbed: float = 0.0, saving: bool = False) -> tuple[int, str]:
    """Which trial to follow, and why. The first, unless another is clearly faster and the times can be trusted.

    `disturbed`: the part of the time for which threads were ready to run and had no core.
    """
    rule = min(trials[0].seconds)
    if disturbed > DISTURBED:
        return 0, f"other programs had these cores for {disturbed:.0%} of the time, so times tell little"
    if median(trials[0].seconds) > STEADY * rule:
        return 0, "times vary too much to tell"
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
