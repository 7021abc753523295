"""The choice whether prefill and decode share steps or take turns, and the length of prefill steps. Never: scheduling
turns (engine/)."""

from __future__ import annotations

from proa.machine.machine import Gpu
from proa.models.spec import Model
from proa.plan.plan import GpuPlan
from proa.plan.vram import rows_bytes
from proa.types import Decision

SHARE = 0.5

# Decode waits for a whole shared step, but only for a layer of a step in turns. In turns, long steps pay off for the
# CPU's experts: on an Emerald Rapids, 4096 tokens took a third of the time in one step that they took in eight
# (decision 038).
SHARED_TOKENS, TURN_TOKENS = 512, (4096, 2048, 1024)
MOST_VRAM = 0.02  # share of free VRAM that the rows of a step in turns may take


def prefill_share(asked: float | None, gpu: GpuPlan | None, *, deterministic: bool = False) -> tuple[float, Decision]:
    """Fraction of time for prefill while requests decode, and its row; 0: prefill and decode share steps, which
    --deterministic rules out."""
    name, got = "prefill share", SHARE if asked is None else asked
    if asked == 0:
        return 0.0, Decision(name, "0", "0", "prompts share steps with decode, which waits for each whole step")
    if asked is None and gpu is not None and gpu.gpu_only and not deterministic:
        return 0.0, Decision(name, "auto", "0", "the GPU runs everything: steps are short, and prompts share them")
    why = "while requests decode, prompts are computed a few layers at a time, alternating with decode steps"
    return got, Decision(name, "auto" if asked is None else f"{asked:g}", f"{got:g}", why)


def turn_tokens(spec: Model, gpu: Gpu, least: int) -> tuple[int, ...]:
    """Candidate lengths of prefill steps in turns, above `least` tokens, the longest first; none on a simulated GPU."""
    if gpu.simulated:
        return ()
    room_bytes = MOST_VRAM * gpu.free_bytes
    return tuple(tokens for tokens in TURN_TOKENS if tokens > least and rows_bytes(spec, tokens) <= room_bytes)


def batch_row(asked: int | None, running: int, got: int) -> Decision:
    why = "prompts are computed in chunks of at most this size"
    if asked is not None and got > asked:
        why = f"raised so that all {running} running requests can decode in one step"
    elif asked is None and got in TURN_TOKENS:
        why = f"{why}; decode does not wait for a whole one, and the CPU's experts are faster with many tokens"
    return Decision("tokens per step", "auto" if asked is None else str(asked), str(got), why)
