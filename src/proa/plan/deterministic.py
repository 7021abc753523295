"""What --deterministic decides: experts stay where the plan puts them, and prompts are computed apart from decode, in
cells where a token's bits depend on the shape of its step (docs/decisions/040). Never: schedules, kernels.
"""

from __future__ import annotations

from dataclasses import replace

from proa.config.options import EngineOptions
from proa.errors import UsageError
from proa.plan.plan import GpuPlan
from proa.types import Decision

# Prefixes are reused in whole cells, so smaller ones lose less; experts in RAM are read once for each cell.
CELL_TOKENS, CELL_TOKENS_BESIDE_CPU = 512, 2048


def fixed_options(options: EngineOptions) -> EngineOptions:
    """Options with what --deterministic rules out turned off. Raises UsageError for what was asked by name."""
    if not options.scheduler.deterministic:
        return options
    if options.gpus.expert_placement == "dynamic":
        raise UsageError(
            "--expert-placement dynamic moves experts between GPU and CPU, whose bits differ; --deterministic needs "
            "them to stay.",
            "Use --expert-placement uniform, front-loading or frequency.", param="expert_placement",
        )  # fmt: skip
    if options.scheduler.prefill_share == 0:
        raise UsageError(
            "--prefill-share 0 lets prompts share steps with decode; with --deterministic they never do.",
            "Leave --prefill-share out, or choose a share above 0.", param="prefill_share",
        )  # fmt: skip
    placement = options.gpus.expert_placement
    if placement == "auto":
        placement = "frequency" if options.gpus.expert_counts else "uniform"
    return replace(options, gpus=replace(options.gpus, co_fetch="off", expert_placement=placement))


def cell_tokens(options: EngineOptions, batch_tokens: int, isa: str, gpu: GpuPlan | None) -> int | None:
    """Tokens of a cell; None: any step of prompts gives a row the same bits (the native kernels of a CPU). Raises
    UsageError where a step has no room for a page."""
    if not options.scheduler.deterministic or (gpu is None and isa):
        return None
    page_tokens = options.cache.page_tokens
    wanted = CELL_TOKENS if gpu is None or gpu.gpu_only else CELL_TOKENS_BESIDE_CPU
    got = min(wanted, batch_tokens) // page_tokens * page_tokens
    if got == 0:
        raise UsageError(
            f"--max-batch-tokens {batch_tokens} is less than a page of {page_tokens} tokens, which is the least that "
            "--deterministic computes of a prompt at a time.",
            f"Use at least --max-batch-tokens {page_tokens}, or smaller --page-tokens.", param="max_batch_tokens",
        )  # fmt: skip
    return got


def row(asked: bool, cell_tokens: int | None) -> Decision:
    if not asked:
        return Decision("same answer", "--deterministic off", "usually", "see docs/reproducibility.md")
    if cell_tokens is None:
        why = "a row's kernels depend on its phase alone, prompt or decode"
    else:
        why = f"prompts are computed {cell_tokens} tokens at a time, each alone; prefixes are reused in such cells"
    return Decision("same answer", "--deterministic", "always", f"{why}; experts stay where they are")
