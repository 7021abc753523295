"""Chooses how many of the pool's workers take part in a step, by trials on the loaded model. Never: pinning them.

A step of few tokens is bound by memory bandwidth, which often needs fewer workers than there are cores; a core may be
slower than others, or share its execution units with an SMT sibling. So decode is timed with several numbers of
workers, on the model's own step: reading a buffer at full speed would not show the weights' placement, small operations
and barriers. Longer steps are bound by arithmetic and use all workers.
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

TRIALS_S = 0.25  # for all trials together, beside two steps that measure how long one takes
ROUNDS = 5
# A number other than the rule is chosen only if
CLEAR = 0.98  # its median time is below this fraction of the rule's best time,
STEADY = 1.25  # the rule's median time is at most this multiple of its best time,
DISTURBED = 0.1  # and threads were ready to run without a core for at most this fraction of the time.
SAVING = 1.1  # to save power, a step may take this multiple of the fastest


class Crew:
    """The number of workers of each team in steps of few tokens (`few`) and in longer ones (`many`). The calling thread
    counts as the first worker of the first team."""

    def __init__(self, pool: Pool, all_workers: Sequence[int], claim: CpuClaim | None = None) -> None:
        self._pool, self._claim = pool, claim  # the claim is held as long as the crew exists
        self.few = self.many = tuple(all_workers)
        self._now: tuple[int, ...] = ()

    def call(self, *, few: bool) -> None:
        """Use the workers for the next step from now on; the others sleep."""
        wanted = self.few if few else self.many
        if wanted != self._now:
            self._pool.use((wanted[0] - 1, *wanted[1:]))
            self._now = wanted


@dataclass(frozen=True)
class Trial:
    """A number of workers and the seconds that they took for the same work, by round."""

    workers: int
    seconds: tuple[float, ...]


def waited_s() -> float:
    """Thread-seconds in which threads of this process were ready to run without a core; 0 if the kernel does not count
    them (/proc/self/task/*/schedstat)."""
    waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
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
    """Set `crew.few` to the best of `trials`, the first of which is the rule (the default). Returns the start-up
    table's row; None if there are fewer than two trials.

    step(i, share): computes the first `share` of a step of one token, which differs with i.
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

    whole_s = min(seconds_of(trials[0], range(1), 1.0) for _ in range(2))  # the first one faults in memory
    each_s = TRIALS_S / (ROUNDS * len(trials))
    share, steps = min(1.0, each_s / whole_s), max(1, int(each_s / whole_s))
    seconds: list[list[float]] = [[] for _ in trials]
    waited_before = waited()
    for i in range(ROUNDS):  # each round runs all trials, so that other load on the machine affects all of them
        for counts, took in zip(trials, seconds, strict=True):
            took.append(seconds_of(counts, range(i * steps, (i + 1) * steps), share))
    wanted_s = sum(sum(counts) * sum(took) for counts, took in zip(trials, seconds, strict=True))
    disturbed = (waited() - waited_before) / wanted_s
    measured = [Trial(sum(c), tuple(s / steps for s in took)) for c, took in zip(trials, seconds, strict=True)]
    chosen, why = best(measured, disturbed=disturbed, saving=saving)
    crew.few = trials[chosen]
    what = "one-token steps" if share == 1 else f"the first {share:.0%} of one-token steps"
    got, rule = measured[chosen].workers, measured[0].workers
    shown = f"{got} of {rule}" if got <= rule else f"{got}: SMT siblings beside the {rule}"
    return Decision("threads for decode", "auto", shown, f"{why}; {what}: {_times(measured)}")


def best(trials: Sequence[Trial], *, disturbed: float = 0.0, saving: bool = False) -> tuple[int, str]:
    """Index of the trial to use, and the reason: the first, unless another is clearly faster and times are reliable.

    `disturbed`: fraction of the workers' time in which threads were ready to run without a core.
    """
    rule = min(trials[0].seconds)
    if disturbed > DISTURBED:
        return 0, f"other programs used these cores for {disturbed:.0%} of the time, so times are not reliable"
    if median(trials[0].seconds) > STEADY * rule:
        return 0, "times vary too much to compare"
    medians = [median(trial.seconds) for trial in trials]
    faster = [i for i in range(1, len(trials)) if medians[i] < CLEAR * rule]
    chosen = min(faster, key=lambda i: medians[i], default=0)
    why = "the fastest" if faster else "no other number is clearly faster"
    if saving:
        enough = [i for i, trial in enumerate(trials) if median(trial.seconds) <= SAVING * medians[chosen]]
        fewest = min(enough, key=lambda i: trials[i].workers)
        if trials[fewest].workers < trials[chosen].workers:
            return fewest, f"the fewest within {SAVING - 1:.0%} of the fastest"
    return chosen, why


def _times(trials: Sequence[Trial]) -> str:
    """The best time of each trial as text, most workers first."""
    ordered = sorted(trials, key=lambda trial: -trial.workers)
    return ", ".join(f"{trial.workers} take {min(trial.seconds) * 1e3:.2f} ms" for trial in ordered)
