"""Where the weights of a layer's experts are: slots of a device, stacks in RAM. Never: computing with them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from proa.hybrid.slots import ExpertSlots
from proa.ops.gated import GatedStacks
from proa.ops.packed import Memory, Stack
from proa.ops.residency import ExpertShape
from proa.ops.staging import Staging
from proa.ops.table import Parameters


class LayerMemory:
    """`resident`: experts that the device has. `inclusive`: RAM has those as well; else only the others."""

    def __init__(
        self, shape: ExpertShape, experts: int, resident: Sequence[int], inclusive: bool, device: torch.device,
        ram: Memory, staging: Staging,
    ) -> None:  # fmt: skip
        self.shape, self.experts = shape, experts
        self.slots = ExpertSlots(shape, resident, device)
        here = self.slots.slot_of
        self.in_ram = [e for e in range(experts) if inclusive or e not in here]
        self.number_of = {expert: number for number, expert in enumerate(self.in_ram)}  # among the CPU's
        self.cpu_computes = len(here) < experts
        self.stacks = GatedStacks(ram, len(self.in_ram), shape.hidden, shape.width, bias=False) if self.in_ram else None
        self._staging = staging

    def parameters(self) -> Parameters:
        for e in range(self.experts):
            if self.stacks is not None and e in self.number_of:
                sinks = self.stacks.sinks(self.number_of[e])
            else:
                sinks = self.slots.sinks(e, self._staging)
            yield from ((f"{e}.{name}", sink) for name, sink in sinks)

    def fill_slots(self) -> None:
        """Copy what RAM has too, once it is loaded."""
        for expert, slot in self.slots.slot_of.items():
            if expert in self.number_of:
                for to, packed in self.slots.slot(slot).parts(*self.in_place(self.number_of[expert])):
                    to.copy_(packed)

    def in_place(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Packed bytes of an expert in RAM, piece by piece: of gate and up, of down."""
        if self.stacks is None:
            raise ValueError("RAM has no expert of this layer")
        up, down = (_spans(stack, number) for stack in (self.stacks.up, self.stacks.down))
        return up, down

    def addresses(self, number: int) -> tuple[int, int]:
        """Of an expert in RAM, gate and up and down; 0 and 0 where one of them lies in several pieces."""
        if self.stacks is None:
            raise ValueError("RAM has no expert of this layer")
        spans = [stack.spans(number) for stack in (self.stacks.up, self.stacks.down)]
        if any(len(pieces) != 1 for pieces in spans):
            return 0, 0
        (up, _), (down, _) = (pieces[0] for pieces in spans)
        return up, down


def _spans(stack: Stack, index: int) -> list[Tensor]:
    return [
        torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        for address, nbytes in stack.spans(index)
    ]
