"""A device's memory for some of a layer's experts, packed exactly as the CPU packs them. Never: which experts they are,
what is computed with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proa.ops.residency import ExpertShape, Residency


class ExpertSlots:
    """Slot i holds expert resident[i]. up, down: uint8 [slots, panels, panel bytes], not initialised."""

    def __init__(self, shape: ExpertShape, resident: Sequence[int], device: torch.device) -> None:
        self.shape, self.resident = shape, tuple(resident)
        self.slot_of = {expert: slot for slot, expert in enumerate(resident)}
        self.up, self.down = (
            torch.empty(len(resident), of.panels, of.panel_bytes, dtype=torch.uint8, device=device)
            for of in (shape.up, shape.down)
        )

    def residency(self, experts: int, on_cpu: Sequence[int]) -> Residency:
        """The layer's tables, where `on_cpu` lists the experts that the CPU computes, by their numbers there."""
        up, down = torch.zeros(experts, dtype=torch.int64), torch.zeros(experts, dtype=torch.int64)
        cpu = torch.full((experts,), -1, dtype=torch.int32)
        for expert, slot in self.slot_of.items():
            up[expert], down[expert] = self.up[slot].data_ptr(), self.down[slot].data_ptr()
        for number, expert in enumerate(on_cpu):
            if expert not in self.slot_of:
                cpu[expert] = number
        return Residency(up.to(self.up.device), down.to(self.up.device), cpu.to(self.up.device))

    def panels(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of gate, up and down: uint8 [panels, panel bytes]."""
        slot = self.slot_of[expert]
        return self.up[slot, 0::2], self.up[slot, 1::2], self.down[slot]

    def copy_in(self, expert: int, up: Sequence[Tensor], down: Sequence[Tensor]) -> None:
        """From spans of packed bytes, in the panels' order."""
        slot = self.slot_of[expert]
        for memory, spans in ((self.up[slot], up), (self.down[slot], down)):
            whole, at = memory.view(-1), 0
            for span in spans:
                whole[at : at + len(span)].copy_(span)
                at += len(span)
