"""A device's memory for some of a layer's experts, packed exactly as the CPU packs them. Never: which experts they are,
what is computed with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa.ops.residency import ExpertShape


@dataclass(frozen=True)
class Slot:
    """Room for one expert. up, down: uint8 [panels, panel bytes] of the device."""

    up: Tensor
    down: Tensor

    def parts(self, up: Sequence[Tensor], down: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What belongs together: the slot's bytes, and these spans of packed bytes in the panels' order."""
        pairs = []
        for memory, spans in ((self.up, up), (self.down, down)):
            whole, at = memory.view(-1), 0
            for span in spans:
                pairs.append((whole[at : at + len(span)], span))
                at += len(span)
        return pairs


class ExpertSlots:
    """Slot i holds expert resident[i] at first. up, down: uint8 [slots, panels, panel bytes], not initialised."""

    def __init__(self, shape: ExpertShape, resident: Sequence[int], device: torch.device) -> None:
        self.shape, self.resident = shape, tuple(resident)
        self.slot_of = {expert: slot for slot, expert in enumerate(resident)}
        self.up, self.down = (
            torch.empty(len(resident), of.panels, of.panel_bytes, dtype=torch.uint8, device=device)
            for of in (shape.up, shape.down)
        )

    def slot(self, number: int) -> Slot:
        return Slot(self.up[number], self.down[number])

    def panels(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of gate, up and down: uint8 [panels, panel bytes]."""
        slot = self.slot_of[expert]
        return self.up[slot, 0::2], self.up[slot, 1::2], self.down[slot]
