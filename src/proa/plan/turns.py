"""Chooses whether prefill and decode share steps or take turns, with the rows of the start-up table. Never: the rules
(machine/cost/turns.py), scheduling turns (engine/)."""

from __future__ import annotations

import re
from functools import partial

from proa.config.options import SchedulerOptions
from proa.errors import ResourceError, UsageError
from proa.machine.cost import turns
from proa.machine.cost.turns import GapLimit
from proa.machine.machine import Gpu
from proa.models.spec import Model
from proa.obs.units import format_ms
from proa.plan.plan import GpuPlan, Roof
from proa.plan.vram import device_row_bytes, rows_bytes
from proa.types import Decision

_GAP = re.compile(r"(\d+(?:\.\d+)?)\s*(x|ms|s)", re.IGNORECASE | re.ASCII)


def asked_gap(text: str) -> GapLimit | None:
    """Parse a value of --max-itl: "2.5x", "80ms" or "0.5s"; None for "auto" and "none". Raises UsageError."""
    if text in ("auto", "none"):
        return None
    match = _GAP.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--max-itl is {text!r}.",
            "Give a factor of the undisturbed gap between tokens such as 2.5x, a time such as 80ms or 0.5s, auto or "
            "none.", param="max_itl",
        )  # fmt: skip
    number, unit = float(match[1]), match[2].lower()
    if unit == "x" and number <= 1:
        raise UsageError(
            f"--max-itl {text} is not longer than the undisturbed gap between tokens: no time is left for prompts.",
            f"Give a factor above 1; the default is {turns.MAX_ITL:g}x.", param="max_itl",
        )  # fmt: skip
    if number <= 0:
        raise UsageError(f"--max-itl {text} is no time.", "Give for example 80ms, or a factor such as 2.5x.",
                         param="max_itl")  # fmt: skip
    return GapLimit(factor=number) if unit == "x" else GapLimit(seconds=number / 1000 if unit == "ms" else number)


def gap_limit(
    asked: SchedulerOptions, gpu: GpuPlan | None, roof: Roof
) -> tuple[GapLimit | None, Decision]:  # fmt: skip
    """The longest gap between decode steps while a prompt is computed, and its row; None: prompts and decode share
    steps. Raises UsageError, and ResourceError for a time that no decode step of this plan keeps to."""
    given, least_s = asked_gap(asked.max_itl), 1 / roof.tokens_per_s
    ample = format_ms(max(0.001, turns.MAX_ITL * least_s)).replace(" ", "")
    if given is not None and given.seconds and given.seconds <= least_s:
        raise ResourceError(
            f"--max-itl {asked.max_itl} is below the undisturbed gap between tokens: a decode step of this plan takes "
            f"at least {format_ms(least_s)} ({roof.bound_by} bandwidth) without a prompt beside it.",
            f"Give more, such as {ample}, or a factor such as {turns.MAX_ITL:g}x.",
            param="max_itl",
        )  # fmt: skip
    gpu_only = gpu is not None and gpu.gpu_only
    got = given
    if asked.max_itl == "auto":
        got = turns.default_limit(gpu_only=gpu_only, deterministic=asked.deterministic)
    if got is not None:
        why = "while requests decode, prompts are computed a few layers at a time between decode steps, as many as fit"
        if got.seconds:
            why += f"; a decode step takes at least {format_ms(least_s)}"
    elif asked.max_itl == "none":
        why = "prompts share steps with decode, which waits for each whole step"
    else:
        why = "the GPU runs everything: steps are short, and prompts share them"
    shown = "none" if got is None else f"{got.factor:g}x" if got.factor else format_ms(got.seconds)
    return got, Decision("longest gap", asked.max_itl, shown, why)


def turn_tokens(spec: Model, gpu: Gpu, least: int) -> tuple[int, ...]:
    """Candidate lengths of prefill steps in turns, above `least` tokens, the longest first; none on a simulated GPU."""
    if gpu.simulated:
        return ()
    each_bytes = device_row_bytes(spec)
    return turns.turn_tokens(partial(rows_bytes, spec, each_bytes=each_bytes), gpu.free_bytes, least)


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
