"""Terms that a MoE layer adds to the sum of the device's routed experts. Never: adding them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from proa.ops.bell_block import Bell


@dataclass(frozen=True)
class Added:
    """cpu: the sum of the CPU's experts, float32 [T, hidden], or the doorbell to wait for it; shared: bfloat16
    [T, hidden], multiplied by sigmoid(shared_gate [T, 1]) if given.
    """

    cpu: Tensor | Bell | None = None
    shared: Tensor | None = None
    shared_gate: Tensor | None = None
