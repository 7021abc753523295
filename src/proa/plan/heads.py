"""Limits of the attention kernels, for refusals before anything is loaded."""

from __future__ import annotations

from proa.models.spec import Model
from proa.ops.sizes import MOST_HEAD_DIM, MOST_HEAD_GROUP

CPU_MOST_DIM = 576  # head dimension: csrc/src/isa/attend.h


def beyond_cpu(spec: Model) -> str:
    """The reason why the native kernels cannot compute the model's heads; empty if they can."""
    widest = max((mixer.head_dim for mixer in spec.attention), default=0)
    return "" if widest <= CPU_MOST_DIM else f"heads have {widest} dimensions, more than {CPU_MOST_DIM}"


def beyond_gpu(spec: Model) -> str:
    """The reason why the GPU's kernels cannot compute the model's heads; empty if they can."""
    widest = max((mixer.head_dim for mixer in spec.attention), default=0)
    group = max((mixer.heads // mixer.kv_heads for mixer in spec.attention), default=0)
    if widest > MOST_HEAD_DIM:
        return f"heads have {widest} dimensions, more than {MOST_HEAD_DIM}"
    return "" if group <= MOST_HEAD_GROUP else f"{group} query heads share a KV head, more than {MOST_HEAD_GROUP}"
