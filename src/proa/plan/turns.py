"""The choice whether prefill and decode share steps or take turns, and its rows of the start-up table. Never: the rules
(machine/cost/turns.py), scheduling turns (engine/)."""

from __future__ import annotations

from functools import partial

from proa.config.options import SchedulerOptions
from proa.machine.cost import turns
from proa.machine.machine import Gpu
from proa.models.spec import Model
from proa.plan.plan import GpuPlan
from proa.plan.vram import rows_bytes
from proa.types import Decision


def prefill_share(asked: float | None, gpu: GpuPlan | None, *, deterministic: bool = False) -> tuple[float, Decision]:
    """Fraction of time for prefill while requests decode, and its row; 0: prefill and decode share steps."""
    gpu_only = gpu is not None and gpu.gpu_only
    got = turns.prefill_share(gpu_only=gpu_only, deterministic=deterministic) if asked is None else asked
    why = "while requests decode, prompts are computed a few layers at a time, alternating with decode steps"
    if asked == 0:
        why = "prompts share steps with decode, which waits for each whole step"
    elif not got:
        why = "the GPU runs everything: steps are short, and prompts share them"
    return got, Decision("prefill share", "auto" if asked is None else f"{asked:g}", f"{got:g}", why)


def turn_tokens(spec: Model, gpu: Gpu, least: int) -> tuple[int, ...]:
    """Candidate lengths of prefill steps in turns, above `least` tokens, the longest first; none on a simulated GPU."""
    return () if gpu.simulated else turns.turn_tokens(partial(rows_bytes, spec), gpu.free_bytes, least)


def batch_row(options: SchedulerOptions, got: int, shared: int | None) -> Decision:
    """shared: limit of steps that prompts share with decode; None: they take turns."""
    asked, running = options.max_batch_tokens, options.max_running
    why = "prompts are computed in chunks of at most this size"
    if asked is not None and got > asked:
        why = f"raised so that all {running} running requests can decode in one step"
    elif asked is None and got in turns.TURN_TOKENS:
        why = f"{why}, with which experts are faster than with few tokens"
        why += f"; {shared} while others decode" if shared else "; decode does not wait for a whole one"
    return Decision("tokens per step", "auto" if asked is None else str(asked), str(got), why)
