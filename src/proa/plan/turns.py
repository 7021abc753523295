"""Whether prompts and those who decode share steps or take turns. Never: how turns are taken (engine/lane.py)."""

from __future__ import annotations

from proa.plan.plan import GpuPlan
from proa.types import Decision

SHARE = 0.5


def prefill_share(asked: float | None, gpu: GpuPlan | None) -> tuple[float, Decision]:
    """Of the time, while others decode; 0: they share steps."""
    name, got = "prefill share", SHARE if asked is None else asked
    if asked == 0:
        return 0.0, Decision(name, "0", "0", "prompts share steps with those who decode, who wait for all of a step")
    if asked is None and gpu is not None and gpu.gpu_only:
        return 0.0, Decision(name, "auto", "0", "a GPU alone is soon done with a step of prompts: all share it")
    why = "while others decode, prompts are computed a few layers at a time, in turn with their steps"
    return got, Decision(name, "auto" if asked is None else f"{asked:g}", f"{got:g}", why)
