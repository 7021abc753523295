"""The inputs that all layers of one forward pass share. Never: policy, token ids of requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from proa.models.spec import Rope
from proa.ops.caches import Caches
from proa.ops.table import AttentionBatch


@dataclass(frozen=True)
class Step:
    batch: AttentionBatch
    angles: dict[Rope, tuple[Tensor, Tensor]]  # per distinct rotary embedding: cos, sin float32 [T, dim/2]
    caches: Caches
