"""What a MoE layer adds to the routed experts of the device. Never: adding it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from proa.ops.bell_block import Bell


@dataclass(frozen=True)
class Added:
    """cpu float32 [T, hidden]: the sum of the CPU's experts, or where it will be; shared bfloat16 [T, hidden], times
    the sigmoid of shared_gate [T, 1] where there is one.
    """

    cpu: Tensor | Bell | None = None
    shared: Tensor | None = None
    shared_gate: Tensor | None = None
