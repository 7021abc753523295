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
        self.cpu_computes = len(here) < experts
        self.stacks = GatedStacks(ram, len(self.in_ram), shape.hidden, shape.width, bias=False) if self.in_ram else None
        self._staging = staging

    def parameters(self) -> Parameters:
        number = {expert: i for i, expert in enumerate(self.in_ram)}
        for e in range(self.experts):
            if self.stacks is not None and e in number:
                sinks = self.stacks.sinks(number[e])
            else:
                sinks = self.slots.sinks(e, self._staging)
            yield from ((f"{e}.{name}", sink) for name, sink in sinks)

    def fill_slots(self) -> None:
        """Copy what RAM has too, once it is loaded."""
        if self.stacks is None:
            return
        for number, expert in enumerate(self.in_ram):
            if expert in self.slots.slot_of:
                up, down = (_spans(stack, number) for stack in (self.stacks.up, self.stacks.down))
                self.slots.copy_in(expert, up, down)


def _spans(stack: Stack, index: int) -> list[Tensor]:
    """A matrix's packed bytes, piece by piece."""
    return [
        torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        for address, nbytes in stack.spans(index)
    ]
