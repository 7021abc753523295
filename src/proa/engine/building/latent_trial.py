"""A trial of the GPU's latent attention at start: expanded keys and values by libraries' kernels against Proa's over
latents. Never: the kernels, using the fastest one.
"""

from __future__ import annotations

from functools import partial

import torch

from proa.engine.building.attention_trial import DETERMINISTIC
from proa.models.spec import Model
from proa.ops.caches import Caches
from proa.ops.cuda_attention import Rectangle, cudnn
from proa.ops.expanded_latents import Causal, ExpandedAttention, flash
from proa.ops.gpu_traits import GpuTraits
from proa.ops.latent_rates import seconds
from proa.ops.sizes import SEGMENT_TOKENS, expands
from proa.plan.kernels import latent_kernels
from proa.plan.plan import Plan
from proa.types import Decision

ROW = "latent attention of prompts"
OVER_LATENTS, FLASH = "over latents", "flash-attention"
# Of the trial, if the plan has so many. A segment of each size: cuDNN prepares its kernels when they are first used.
ROWS, PAST = 1024, sum(SEGMENT_TOKENS)


@torch.inference_mode()
def result(
    plan: Plan, spec: Model, caches: Caches, traits: GpuTraits, causal: Causal = flash, rectangle: Rectangle = cudnn
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
    timed = partial(seconds, kernels[0], caches, traits=traits, rows=rows, past=past)
    found, refused = dict[str, tuple[float, ExpandedAttention | None]](), ""
    for name, by in ((FLASH, None), (f"cuDNN and {FLASH}", rectangle)):
        way = ExpandedAttention(causal, plan.max_batch_tokens, by)
        try:
            found[f"expanded, by {name}"] = timed(way), way
        except RuntimeError as e:  # the GPU is too old, or this torch has no such kernel
            refused += f"; {name}: {str(e).splitlines()[0]}"
    found[OVER_LATENTS] = timed(None), None
    best = min(found, key=lambda name: found[name][0])
    times = ", ".join(f"{name} {1e3 * of:.2f} ms" for name, (of, _) in found.items())
    why = f"a layer of {rows} tokens behind {past}: {times}{refused}"
    return found[best][1], Decision(ROW, "auto", best, why)
