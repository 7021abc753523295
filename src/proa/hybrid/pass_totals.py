"""What passes of prompts took and copied: values. Never: measuring, the order of a pass (streaming.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class PassTotals:
    """Sums over all passes since the start."""

    passes: int = 0
    pass_tokens: int = 0
    streamed: int = 0  # experts copied to the ring, over all layers
    left_to_cpu: int = 0  # experts in RAM that were not
    streamed_bytes: int = 0
    copy_s: float = 0.0  # of passes that were measured, as the following ones
    predicted_s: float = 0.0  # sum over layers of the longer of copies and computing, as divided
    took_s: float = 0.0  # from the begin of each pass to the end of its launches
    own_s: float = 0.0  # of this, the GPU's time for all but experts
    experts_s: float = 0.0  # for experts
    waited_s: float = 0.0  # its waits for copies
    cpu_wait_s: float = 0.0  # its waits for the CPU's sums
    decided_s: float = 0.0  # its waits until the host had divided a layer's experts by the routing
    routed: int = 0  # passes divided by their routing to the end
    promoted: int = 0  # experts that took the slots of others from the ring


class Times(NamedTuple):
    """Device time of a pass, in seconds. own: all that is not experts; waited: for copies; experts: the device's
    experts; cpu: waits for the CPU's sums; decided: from a layer's routing until its table is there."""

    own: float
    waited: float
    experts: float
    cpu: float
    decided: float


OWN, WAITED, EXPERTS, OF_CPU, DECIDED = range(5)  # fields of Times: what the device did before a mark
