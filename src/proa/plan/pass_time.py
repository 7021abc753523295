"""The time of a pass of streamed prefill: what waits for what on PCIe, on the GPU and on the CPU. Pure. Never: rates,
dividing experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proa.ops.sizes import RING_BANKS


@dataclass(frozen=True)
class PassLayer:
    """Seconds of a layer. own_s: of the GPU, before its experts; copies_s: of the experts that are copied, in `groups`
    groups; experts_s: of the GPU's experts; cpu_s: of the CPU's, which begin with them."""

    own_s: float
    copies_s: float = 0.0
    groups: int = 1
    experts_s: float = 0.0
    cpu_s: float = 0.0


def pass_seconds(layers: Sequence[PassLayer]) -> float:
    """Seconds of a pass through these layers. A group is copied once the one before it has arrived and the GPU has
    computed the last one in its bank, and computed once it has arrived: hybrid/streaming.py has this order."""
    free_s = [0.0] * RING_BANKS  # of the banks, in the order of their next use
    copied_s = ended_s = 0.0
    for layer in layers:
        begun_s = ended_s = ended_s + layer.own_s
        if not layer.copies_s:
            ended_s = begun_s + max(layer.experts_s, layer.cpu_s)
            continue
        for _ in range(layer.groups):
            copied_s = max(copied_s, free_s.pop(0)) + layer.copies_s / layer.groups
            ended_s = max(ended_s, copied_s) + layer.experts_s / layer.groups
            free_s.append(ended_s)
        ended_s = max(ended_s, begun_s + layer.cpu_s)
    return ended_s
