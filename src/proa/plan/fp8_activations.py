"""Activations rounded to E4M3 on a GPU: whether that is to be had as asked, and the memory it takes. Never: kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from proa.errors import UsageError
from proa.models.spec import Model, Moe
from proa.native.formats import E4M3_FORMS, kept_form
from proa.plan.budget import Demand
from proa.plan.plan import GpuPlan
from proa.plan.vram import GRAPH_NODE_BYTES, GRAPH_ROWS_MOST, dense_params
from proa.types import Decision

LEAST_CAPABILITY = (8, 9)  # of GPUs that multiply E4M3 with E4M3
LEAST_TOKENS, LEAST_OF_AN_EXPERT = 64, 11  # of a step, and on average, from which rows are rounded
SCALE_COLUMNS, SCALE_BYTES = 128, 4
GRAPH_NODES_PER_BLOCK = 8  # more, of a step of many sequences: rows are rounded before each product


def with_fp8(need: Demand, spec: Model, batch_tokens: int, max_running: int) -> Demand:
    """`need` of VRAM, and that of rounded rows: of the widest linear layer, and of a layer's routed experts."""
    linear = max((row_bytes(shape[1]) for _, shape in dense_params(spec) if len(shape) == 2), default=0)
    routed = [block.ffn for block in spec.blocks if isinstance(block.ffn, Moe)]
    experts = max((row_bytes(f.hidden) + f.top_k * row_bytes(f.width) for f in routed), default=0)
    graphs = GRAPH_NODES_PER_BLOCK * len(spec.blocks) * GRAPH_NODE_BYTES if max_running >= GRAPH_ROWS_MOST else 0
    return replace(need, workspace_base_bytes=need.workspace_base_bytes + batch_tokens * (linear + experts) + graphs)


def row_bytes(columns: int) -> int:
    """Codes, filled up to whole groups, and their scales."""
    return -(-columns // SCALE_COLUMNS) * (SCALE_COLUMNS + SCALE_BYTES)


def fp8_rows(asked: bool, model: str, gpu: GpuPlan, stored: Mapping[str, str]) -> tuple[Decision, ...]:
    """Of the start-up table. stored: the checkpoint's type of each parameter.

    Raises UsageError where the GPU or the weights are not such.
    """
    if not asked:
        return ()
    if gpu.simulated or gpu.capability < LEAST_CAPABILITY:
        has = "is simulated" if gpu.simulated else f"has {'.'.join(map(str, gpu.capability))}"
        raise UsageError(
            "--fp8-activations needs a GPU that multiplies FP8, of compute capability 8.9 or newer; "
            f"{gpu.device} {has}.",
            "Leave it out: products are in bfloat16 then, and activations are not rounded.", param="fp8_activations",
        )  # fmt: skip
    if not any(kept_form({kind}, SCALE_COLUMNS) in E4M3_FORMS for kind in set(stored.values())):
        raise UsageError(
            "--fp8-activations is for weights in FP8 (E4M3) with a scale for each 128 x 128 block, channel or tensor; "
            f"{model} has none.",
            "Leave it out.", param="fp8_activations",
        )  # fmt: skip
    why = (
        "as asked; lossy: on the GPU rows are rounded to E4M3 for products with FP8 weights, in steps of "
        f"{LEAST_TOKENS} tokens or more, of experts that have {LEAST_OF_AN_EXPERT} or more on average"
    )
    return (Decision("fp8 activations", "on", "on", why),)
