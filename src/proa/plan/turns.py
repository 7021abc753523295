"""Whether prompts and those who decode share steps or take turns, and how long steps of prompts may be. Never: how
turns are taken (engine/lane.py)."""

from __future__ import annotations

from proa.machine.machine import Gpu
from proa.models.spec import Model
from proa.plan.plan import GpuPlan
from proa.plan.vram import rows_bytes
from proa.types import Decision

SHARE = 0.5

# Of a shared step everybody waits for all; of a step in turns for a layer. There the CPU's experts want many tokens:
# on an Emerald Rapids 4096 tokens took a third of the time as one step of what they took as eight (decision 038).
SHARED_TOKENS, TURN_TOKENS = 512, (4096, 2048, 1024)
MOST_VRAM = 0.02  # of what is free, for the rows of such a step


def prefill_share(asked: float | None, gpu: GpuPlan | None, *, deterministic: bool = False) -> tuple[float, Decision]:
    """Of the time, while others decode; 0: they share steps, which deterministic ones never do."""
    name, got = "prefill share", SHARE if asked is None else asked
    if asked == 0:
        return 0.0, Decision(name, "0", "0", "prompts share steps with those who decode, who wait for all of a step")
    if asked is None and gpu is not None and gpu.gpu_only and not deterministic:
        return 0.0, Decision(name, "auto", "0", "a GPU alone is soon done with a step of prompts: all share it")
    why = "while others decode, prompts are computed a few layers at a time, in turn with their steps"
    return got, Decision(name, "auto" if asked is None else f"{asked:g}", f"{got:g}", why)


def turn_tokens(spec: Model, gpu: Gpu, least: int) -> tuple[int, ...]:
    """Steps of more than `least` tokens that may be tried, the largest first. A simulated GPU has no unit for them."""
    if gpu.simulated:
        return ()
    room_bytes = MOST_VRAM * gpu.free_bytes
    return tuple(tokens for tokens in TURN_TOKENS if tokens > least and rows_bytes(spec, tokens) <= room_bytes)


def batch_row(asked: int | None, running: int, got: int) -> Decision:
    why = "prefill is cut into pieces of this size"
    if asked is not None and got > asked:
        why = f"raised so that all {running} running requests can decode in one step"
    elif asked is None and got in TURN_TOKENS:
        why = f"{why}: in turns, long ones keep nobody waiting, and the CPU's experts are faster with many tokens"
    return Decision("tokens per step", "auto" if asked is None else str(asked), str(got), why)
