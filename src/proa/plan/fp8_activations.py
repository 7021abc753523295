"""--fp8-activations, rows rounded to E4M3 on a GPU: its conditions and its memory. Never: kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from proa.errors import UsageError
from proa.models.spec import Model
from proa.native.formats import E4M3_FORMS
from proa.ops.sizes import E4M3_ABOVE, E4M3_CAPABILITY, E4M3_COLUMNS, PROMPT_ROWS, buckets
from proa.plan.budget import Demand
from proa.plan.placement import moe_layers
from proa.plan.plan import GpuPlan
from proa.plan.vram import GRAPH_NODE_BYTES
from proa.types import Decision

SCALE_BYTES = 4
GRAPH_NODES = 2  # further nodes per block: rows are rounded twice


def with_fp8(need: Demand, spec: Model, batch_tokens: int, max_running: int) -> Demand:
    """Add the rounded rows of a layer's routed experts to the demand on VRAM."""
    routed = spec.routed.values()
    rows = max((row_bytes(f.hidden) + f.top_k * row_bytes(f.width) for f in routed), default=0)
    graphs = sum(n * f.top_k > E4M3_ABOVE * f.experts for f in routed for n in buckets(max_running))
    nodes_bytes = GRAPH_NODES * graphs * GRAPH_NODE_BYTES
    return replace(need, workspace_base_bytes=need.workspace_base_bytes + batch_tokens * rows + nodes_bytes)


def row_bytes(columns: int) -> int:
    """Bytes of a rounded row: codes, padded to whole groups, and their scales."""
    return -(-columns // E4M3_COLUMNS) * (E4M3_COLUMNS + SCALE_BYTES)


def fp8_rows(
    asked: bool, model: str, gpu: GpuPlan, spec: Model, stored: Mapping[str, str]
) -> tuple[Decision, ...]:  # fmt: skip
    """Rows of the start-up table. stored: the checkpoint's type of each parameter.

    Raises UsageError if the GPU or the experts do not support FP8 products.
    """
    if not asked:
        return ()
    if gpu.simulated or gpu.capability < divmod(E4M3_CAPABILITY, 10):
        has = "is simulated" if gpu.simulated else f"has {'.'.join(map(str, gpu.capability))}"
        raise UsageError(
            "--fp8-activations needs a GPU with FP8 matrix instructions, compute capability 8.9 or newer; "
            f"{gpu.device} {has}.",
            "Leave it out: products are in bfloat16 then, and activations are not rounded.", param="fp8_activations",
        )  # fmt: skip
    rounds = [layer for layer in moe_layers(spec, stored) if not set(E4M3_FORMS).isdisjoint(layer.forms)]
    if not rounds:
        raise UsageError(
            "--fp8-activations needs experts in FP8 (E4M3) with a scale per 128 x 128 block, channel or tensor; "
            f"{model} has none.",
            "Leave it out.", param="fp8_activations",
        )  # fmt: skip
    above = E4M3_ABOVE * rounds[0].experts // rounds[0].top_k
    why = (
        "as asked; lossy: on the GPU rows are rounded to E4M3 for experts of many tokens, where that is faster: in "
        f"steps of more than {above} rows"
    )
    if gpu.prompt_graphs or gpu.block_graphs:
        *others, most = PROMPT_ROWS
        why += f" (a prompt of up to {most} tokens is padded to {', '.join(map(str, others))} or {most} rows)"
    return (Decision("fp8 activations", "on", "experts of many tokens", why),)
