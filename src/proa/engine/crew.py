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

from proa.machine.claims import Claim
from proa.native.pool import Pool
from proa.types import Decision

TRIALS_S = 0.25  # for all trials together, beside two steps that tell how long one takes
ROUNDS = 5
CLEAR = 0.98  # a gain counts where the median of its times is below this part of the best with all workers,
STEADY = 1.25  # and all workers' own times are no more than this apart: their median from their best,
BUSY = 0.9  # and they had their cores to themselves for this part of the time; they spin while they wait
SAVING = 1.1  # how much longer a step may take to save power


class Crew:
    """The CPUs of each team that work in steps of few tokens, and in longer ones. The calling thread is one of them."""

    def __init__(self, pool: Pool, everybody: Sequence[int], claim: Claim | None = None) -> None:
        self._pool, self._claim = pool, claim  # which stands as long as the crew
        self.few = self.many = tuple(everybody)
        self._now: tuple[int, ...] = ()

    def call(self, *, few: bool) -> None:
        """Those for the next step work from now on, the others sleep."""
        wanted = self.few if few else self.many
        if wanted != self._now:
            self._pool.use((wanted[0] - 1, *wanted[1:]))
            self._now = wanted


Clock = Callable[[], tuple[float, float]]  # seconds passed, and those that the threads of this process were on a core


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Trial:
    """A number of workers and the seconds that they took for the same work, round by round."""

    workers: int
    seconds: tuple[float, ...]
    cpu_s: float  # of all threads, in all rounds

    @property
    def busy(self) -> float:
        """The part of the time for which the workers were on a core."""
        return self.cpu_s / (self.workers * sum(self.seconds))


def choose_few(
    crew: Crew,
    trials: Sequence[tuple[int, ...]],
    step: Callable[[int, float], None],
    *,
    saving: bool = False,
    clock: Clock = _now,
) -> Decision | None:
    """Set `crew.few` to the best of `trials`, the first of which is the rule; None if there is nothing to choose.

    step(i, share): the first `share` of a step of one token, which differs with i.
    """
    if len(trials) < 2:
        return None

    def times_of(counts: tuple[int, ...], steps: range, share: float) -> tuple[float, float]:
        crew.few = counts
        crew.call(few=True)
        begin_s, begin_cpu_s = clock()
        for i in steps:
            step(i, share)
        end_s, end_cpu_s = clock()
        return end_s - begin_s, end_cpu_s - begin_cpu_s

    whole_s = min(times_of(trials[0], range(1), 1.0)[0] for _ in range(2))  # the first touches memory
    each_s = TRIALS_S / (ROUNDS * len(trials))
    share, steps = min(1.0, each_s / whole_s), max(1, int(each_s / whole_s))
    times: list[list[tuple[float, float]]] = [[] for _ in trials]
    for turn in range(ROUNDS):  # all in turn, so that what else runs here does not decide
        for counts, took in zip(trials, times, strict=True):
            took.append(times_of(counts, range(turn * steps, (turn + 1) * steps), share))
    measured = [
        Trial(sum(counts), tuple(s / steps for s, _ in took), sum(cpu_s for _, cpu_s in took) / steps)
        for counts, took in zip(trials, times, strict=True)
    ]
    chosen, why = best(measured, saving=saving)
    crew.few = trials[chosen]
    what = "one-token steps" if share == 1 else f"the first {share:.0%} of one-token steps"
    got = f"{measured[chosen].workers} of {measured[0].workers}"
    return Decision("threads for decode", "auto", got, f"{why}; {what}: {_times(measured)}")


def best(trials: Sequence[Trial], *, saving: bool = False) -> tuple[int, str]:
    """Which trial to follow, and why. The first, unless another is clearly faster and the first's times agree."""
    rule = min(trials[0].seconds)
    if trials[0].busy < BUSY:
        return 0, f"other programs ran on these cores for {1 - trials[0].busy:.0%} of the time, which tells nothing"
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
