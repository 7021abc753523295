"""Consequences of --deterministic: expert placement is static, and prompts are computed apart from decode, in cells if
a token's bits depend on the shape of its step, which are streamed by a rule of their length (docs/decisions/040, 070).
Never: schedules, kernels, measured rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from proa.config.options import EngineOptions
from proa.errors import UsageError
from proa.models.spec import Model
from proa.plan.cells import Cells
from proa.plan.placement import MoeLayer
from proa.plan.plan import GpuPlan
from proa.types import Decision

# Prefixes are reused in whole cells, so small cells recompute less. With experts in RAM, which each cell reads once,
# cells are larger.
CELL_TOKENS, CELL_TOKENS_BESIDE_CPU = 512, 2048

# The CPU's rate of computing experts over that of copying them, in FLOP per byte: a prompt of balanced_tokens takes
# either about equally long. A constant, since bits must not depend on what a start measures: 86 on an H200 with 16
# vCPUs with AMX (1376 tokens of Qwen3-30B-A3B in bfloat16 take 0.54 s either way: docs/lab/prefill-h200.md), an
# estimated 20 to 60 without AMX, so that near the limit a prompt takes at most about two to three times as long.
CPU_FLOP_PER_COPIED_BYTE = 64
FLOP_PER_WEIGHT = 2  # and (token, expert) pair


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
    got = _cell_tokens(options, batch_tokens, beside_cpu=gpu is not None and not gpu.gpu_only)
    if got == 0:
        asked, page_tokens = options.scheduler.max_batch_tokens, options.cache.page_tokens
        raise UsageError(
            f"--max-batch-tokens {asked} is less than a page of {page_tokens} tokens, the smallest part of a "
            "prompt that --deterministic computes at a time.",
            f"Use at least --max-batch-tokens {page_tokens}, or smaller --page-tokens.", param="max_batch_tokens",
        )  # fmt: skip
    return got


def cells_beside_cpu(
    spec: Model, layers: Sequence[MoeLayer], options: EngineOptions, batch_tokens: int
) -> Cells | None:  # fmt: skip
    """Cells of a model some of whose experts stay in RAM, if its prompts are streamed; None without --deterministic, or
    if a step is smaller than a page."""
    tokens = _cell_tokens(options, batch_tokens, beside_cpu=True)
    if not options.scheduler.deterministic or not tokens:
        return None
    return Cells(tokens, 1 if options.gpus.prefill == "stream" else min(tokens, balanced_tokens(spec, layers)))


def balanced_tokens(spec: Model, layers: Sequence[MoeLayer]) -> int:
    """Length of a prompt whose experts the CPU computes in the time of copying all experts."""
    copied_bytes = sum(layer.total_bytes for layer in layers)
    flop_per_token = sum(FLOP_PER_WEIGHT * ffn.top_k * 3 * ffn.hidden * ffn.width for ffn in spec.routed.values())
    return max(1, round(CPU_FLOP_PER_COPIED_BYTE * copied_bytes / flop_per_token))


def _cell_tokens(options: EngineOptions, batch_tokens: int, *, beside_cpu: bool) -> int:
    page_tokens = options.cache.page_tokens
    return min(CELL_TOKENS_BESIDE_CPU if beside_cpu else CELL_TOKENS, batch_tokens) // page_tokens * page_tokens


def row(asked: bool, cell_tokens: int | None, streamed_from: int = 0) -> Decision:
    if not asked:
        why = "other requests and cached prefixes may change low bits of a result: docs/reproducibility.md"
        return Decision("deterministic", "off", "off", why)
    if cell_tokens is None:
        why = "a row's kernels depend on its phase alone, prompt or decode"
    else:
        why = f"prompts are computed in cells of {cell_tokens} tokens, and prefixes reused in whole cells"
        if streamed_from:
            why += f"; those of {streamed_from} tokens and more are streamed"
    return Decision("deterministic", "on", "on", f"{why}; the placement of experts is static")
