"""A trial of the GPU's latent attention at start: expanded keys and values by a library's kernel against Proa's over
latents. Never: the kernels, using the faster one.
"""

from __future__ import annotations

import torch

from proa.engine.building.attention_trial import DETERMINISTIC
from proa.models.spec import Model
from proa.ops.caches import Caches
from proa.ops.expanded_latents import Causal, ExpandedAttention, flash
from proa.ops.gpu_traits import GpuTraits
from proa.ops.latent_rates import seconds
from proa.ops.sizes import expands
from proa.plan.kernels import latent_kernels
from proa.plan.plan import Plan
from proa.types import Decision

ROW = "latent attention of prompts"
OVER_LATENTS = "over latents"
ROWS, PAST = 1024, 4096  # of the trial, if the plan has so many


@torch.inference_mode()
def result(
    plan: Plan, spec: Model, caches: Caches, traits: GpuTraits, causal: Causal = flash
) -> tuple[ExpandedAttention | None, Decision | None]:
    """Return the attention for long parts of prompts (None: Proa's kernel) and the start-up table's row, if the plan
    has such parts. caches: of the model; read only."""
    rows = min(ROWS, plan.max_batch_tokens, plan.context_tokens)
    past = min(PAST, plan.context_tokens - rows)
    kernels = [
        kernel
        for kernel in latent_kernels(spec)
        if expands(rows, past, kernel.rank, kernel.rotary_dim, kernel.key_dim, kernel.value_dim)
    ]
    if not kernels:
        return None, None
    if plan.deterministic:
        return None, Decision(ROW, "auto", OVER_LATENTS, DETERMINISTIC)
    expanded = ExpandedAttention(causal, plan.max_batch_tokens)
    try:
        theirs, own = seconds(kernels[0], caches, expanded, traits, rows, past)
    except RuntimeError as e:  # the GPU is too old, or this torch has no flash-attention
        return None, Decision(ROW, "auto", OVER_LATENTS, f"flash-attention: {str(e).splitlines()[0]}")
    found = f"{rows} tokens behind {past}: {1e3 * theirs:.2f} ms a layer expanded, {1e3 * own:.2f} ms {OVER_LATENTS}"
    if own <= theirs:
        return None, Decision(ROW, "auto", OVER_LATENTS, found)
    return expanded, Decision(ROW, "auto", "expanded keys and values, flash-attention", found)
