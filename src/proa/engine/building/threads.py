"""Chooses the number of OpenMP threads for a step, by trial on the loaded model. Never: pinning, other processes' load.

Waking threads costs tens of microseconds for every op. A large model gains more than that, a small one less, depending
on the machine too, so several numbers are tried.
"""

from __future__ import annotations

import time
from statistics import median

from proa.engine.executors.eager import EagerExecutor
from proa.engine.runner import Runner
from proa.engine.scheduling.request import Request
from proa.engine.scheduling.step_plan import StepItem, StepPlan
from proa.types import EngineRequest, Sampling

ROUNDS = 2
STEPS = 2
GAIN = 1.1
HOPELESS = 1.5  # a number this much slower than the fastest in the first round is not tried again


def choose_threads(executor: EagerExecutor, runner: Runner, most: int, prefill_tokens: int, page_tokens: int) -> None:
    """Set the executor's thread counts for decode (one token) and prefill to the fastest of 1, `most` / 2 and `most`.

    Writes to the first pages, so it must run before the cache is in use.
    """
    executor.decode_threads, executor.prefill_threads = (
        _fastest(executor, runner, _plan(num_tokens, page_tokens), most) for num_tokens in (1, prefill_tokens)
    )


def _fastest(executor: EagerExecutor, runner: Runner, plan: StepPlan, most: int) -> int:
    """The fewest threads within GAIN of the best median: the time to wake threads varies more than computing does."""
    candidates = sorted({1, max(1, most // 2), most})
    if len(candidates) == 1:
        return most
    seconds: dict[int, list[float]] = {threads: [] for threads in candidates}
    for _ in range(ROUNDS):  # candidates alternate, so that other load on the machine affects all of them
        for threads in candidates:
            executor.decode_threads = executor.prefill_threads = threads
            for step in range(1 + STEPS):
                begin = time.perf_counter()
                runner.run(plan)
                if step:  # the first step is not timed: it starts threads and touches memory for the first time
                    seconds[threads].append(time.perf_counter() - begin)
        # Only the numbers that are still tried: those dropped were perhaps timed while the machine was less busy.
        medians = {threads: median(seconds[threads]) for threads in candidates}
        candidates = [threads for threads in candidates if medians[threads] <= HOPELESS * min(medians.values())]
    return next(threads for threads in candidates if medians[threads] <= GAIN * min(medians.values()))


def _plan(num_tokens: int, page_tokens: int) -> StepPlan:
    source = EngineRequest(id="", tokens=[0] * num_tokens, sampling=Sampling(max_tokens=1, temperature=0.0))
    request = Request(source, context_tokens=num_tokens + 1, page_tokens=page_tokens)
    request.pages = list(range(-(-num_tokens // page_tokens)))
    return StepPlan((StepItem(request, 0, num_tokens, True),))
