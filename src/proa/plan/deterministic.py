"""Consequences of --deterministic: expert placement is static, and prompts are computed apart from decode, in cells if
a token's bits depend on the shape of its step (docs/decisions/040). Never: schedules, kernels.
"""

from __future__ import annotations

from dataclasses import replace

from proa.config.options import EngineOptions
from proa.errors import UsageError
from proa.plan.plan import GpuPlan
from proa.types import Decision

# Prefixes are reused in whole cells, so small cells recompute less. With experts in RAM, which each cell reads once,
# cells are larger.
CELL_TOKENS, CELL_TOKENS_BESIDE_CPU = 512, 2048


def fixed_options(options: EngineOptions) -> EngineOptions:
    """Turn off options that --deterministic rules out. Raises UsageError for such an option that was given."""
    if not options.scheduler.deterministic:
        return options
    if options.gpus.expert_placement == "dynamic":
        raise UsageError(
            "--expert-placement dynamic moves experts between GPU and CPU, whose results differ in low bits; "
            "--deterministic needs a static placement.",
            "Use --expert-placement uniform, front-loading or frequency.", param="expert_placement",
        )  # fmt: skip
    if options.scheduler.max_itl == "none":
        raise UsageError(
            "--max-itl none computes prompts and decode in shared steps; --deterministic needs separate ones.",
            "Leave --max-itl out, or give a factor such as 2.5x.", param="max_itl",
        )  # fmt: skip
    placement = options.gpus.expert_placement
    if placement == "auto":
        placement = "frequency" if options.gpus.expert_counts else "uniform"
    return replace(options, gpus=replace(options.gpus, co_fetch="off", expert_placement=placement))


def cell_tokens(options: EngineOptions, batch_tokens: int, isa: str, gpu: GpuPlan | None) -> int | None:
    """Tokens per cell; None: a row's bits do not depend on its step (native kernels without a GPU). Raises UsageError
    if a step is smaller than a page."""
    if not options.scheduler.deterministic or (gpu is None and isa):
        return None
    page_tokens = options.cache.page_tokens
    wanted = CELL_TOKENS if gpu is None or gpu.gpu_only else CELL_TOKENS_BESIDE_CPU
    got = min(wanted, batch_tokens) // page_tokens * page_tokens
    if got == 0:
        raise UsageError(
            f"--max-batch-tokens {batch_tokens} is less than a page of {page_tokens} tokens, the smallest part of a "
            "prompt that --deterministic computes at a time.",
            f"Use at least --max-batch-tokens {page_tokens}, or smaller --page-tokens.", param="max_batch_tokens",
        )  # fmt: skip
    return got


def row(asked: bool, cell_tokens: int | None) -> Decision:
    if not asked:
        why = "other requests and cached prefixes may change low bits of a result: docs/reproducibility.md"
        return Decision("deterministic", "off", "off", why)
    if cell_tokens is None:
        why = "a row's kernels depend on its phase alone, prompt or decode"
    else:
        why = f"prompts are computed one at a time in cells of {cell_tokens} tokens, and prefixes reused in whole cells"
    return Decision("deterministic", "on", "on", f"{why}; experts do not move")
