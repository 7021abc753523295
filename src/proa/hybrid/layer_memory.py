"""Where the weights of a layer's experts are: slots of a device, stacks in RAM. Never: computing with them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from proa.hybrid.slots import ExpertSlots
from proa.native.formats import Form, kept_form
from proa.ops.gated import GatedStacks
from proa.ops.packed import Memory, Stack
from proa.ops.residency import ExpertShape
from proa.ops.staging import DevicePanels, Staging
from proa.ops.table import Parameters


class LayerMemory:
    """`resident`: experts that the device has. `inclusive`: RAM has those as well; else only the others.

    Slots and stacks have one form, that of what the checkpoint stores: it is known, and memory taken, once all sinks
    have been told what to expect.
    """

    def __init__(
        self, hidden: int, width: int, experts: int, resident: Sequence[int], inclusive: bool, device: torch.device,
        ram: Memory, staging: Staging,
    ) -> None:  # fmt: skip
        self.hidden, self.width, self.experts = hidden, width, experts
        self._resident, self._device, self._staging = tuple(resident), device, staging
        self._up_stored: set[str] = set()
        self._down_stored: set[str] = set()
        here = frozenset(resident)
        self.in_ram = [e for e in range(experts) if inclusive or e not in here]
        self.number_of = {expert: number for number, expert in enumerate(self.in_ram)}  # among the CPU's
        self.cpu_computes = len(here) < experts
        self.stacks = (
            GatedStacks(ram, len(self.in_ram), hidden, width, False, self._up_stored, self._down_stored)
            if self.in_ram
            else None
        )

    @property
    def shape(self) -> ExpertShape:
        """Of each expert, wherever it is."""
        up, down = kept_form(self._up_stored, self.hidden), kept_form(self._down_stored, self.width)
        return ExpertShape(self.hidden, self.width, up, down)

    @cached_property
    def slots(self) -> ExpertSlots:
        return ExpertSlots(self.shape, self._resident, self._device)

    def parameters(self) -> Parameters:
        for e in range(self.experts):
            if self.stacks is not None and e in self.number_of:
                sinks = self.stacks.sinks(self.number_of[e])
            else:
                sinks = self._slot_sinks(e)
            yield from ((f"{e}.{name}", sink) for name, sink in sinks)

    def _slot_sinks(self, expert: int) -> Parameters:
        """gate, up, down (.weight)."""
        up, down = self._up_stored.add, self._down_stored.add
        sizes = ((self.width, self.hidden, up), (self.width, self.hidden, up), (self.hidden, self.width, down))
        for part, (rows, columns, expect) in enumerate(sizes):

            def where(part: int = part) -> tuple[Tensor, Form]:
                of = self.slots.shape
                return self.slots.panels(expert)[part], of.down_form if part == 2 else of.up_form

            yield f"{('gate', 'up', 'down')[part]}.weight", DevicePanels(rows, columns, expect, where, self._staging)

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
