"""Device memory for some of a layer's experts, packed byte for byte as in RAM. Never: choosing experts, computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from proa.ops.residency import ExpertShape


@dataclass(frozen=True)
class Slot:
    """Memory of one expert. up (gate and up), down: uint8 [panels, panel bytes] on the device."""

    up: Tensor
    down: Tensor

    @cached_property
    def address(self) -> int:
        return self.up.data_ptr()

    def parts(self, up: Sequence[Tensor], down: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pair parts of the slot with the spans of an expert's packed bytes, in panel order: (slot's part, span)."""
        pairs = []
        for memory, spans in ((self.up, up), (self.down, down)):
            whole, at = memory.view(-1), 0
            for span in spans:
                pairs.append((whole[at : at + len(span)], span))
                at += len(span)
        return pairs


class ExpertSlots:
    """Slot i initially belongs to expert resident[i]. up, down: uint8 [slots, panels, panel bytes], uninitialised."""

    def __init__(self, shape: ExpertShape, resident: Sequence[int], device: torch.device) -> None:
        self.shape = shape
        self.slot_of = {expert: slot for slot, expert in enumerate(resident)}
        self.up, self.down = (
            torch.empty(len(resident), of.panels, of.panel_bytes, dtype=torch.uint8, device=device)
            for of in (shape.up, shape.down)
        )

    def slot(self, number: int) -> Slot:
        return Slot(self.up[number], self.down[number])

    def panels(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Panels of an expert's gate, up and down: uint8 [panels, panel bytes] each."""
        slot = self.slot_of[expert]
        return self.up[slot, 0::2], self.up[slot, 1::2], self.down[slot]
