"""The memory of a layer's expert weights: slots on a device, stacks in RAM. Never: computing with them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from proa.hybrid.slots import ExpertSlots
from proa.models.ranks import CPU
from proa.models.spec import Mlp
from proa.native.formats import Form, Layout, kept_form
from proa.native.weights import Piece
from proa.ops.gated import ACTIVATIONS, GatedBiases, GatedStacks
from proa.ops.packed import Memory, Stack
from proa.ops.pieces import TAG, row_of
from proa.ops.residency import Biases, ExpertShape
from proa.ops.staging import DevicePanels, Staging
from proa.ops.table import Parameters


class LayerMemory:
    """`owners`: of each expert, the rank whose GPU holds it, or CPU. `inclusive`: RAM holds all experts; else only
    the CPU's. Experts of other ranks are neither in this device's slots nor among the parameters.

    Slots and stacks have the same form, which follows from the stored types: it is known, and memory is allocated, once
    all sinks have been told the types to expect. Biases do not move: the device and RAM each hold those of all experts
    (decision 030). If RAM does not hold all experts, its stacks have a second copy of their biases, by number in RAM.
    """

    def __init__(
        self, of: Mlp, owners: Sequence[int], inclusive: bool, device: torch.device, ram: Memory, staging: Staging,
        rank: int = 0,
    ) -> None:  # fmt: skip
        """of: the shape of each expert. rank: of this device."""
        self.hidden, self.width, self.experts = of.hidden, of.width, len(owners)
        self.owners, self.rank, experts = tuple(owners), rank, len(owners)
        self._resident = tuple(e for e, owner in enumerate(owners) if owner == rank)
        self._device, self._staging, self._gating = device, staging, of.gating
        self._up_stored: set[str] = set()
        self._down_stored: set[str] = set()
        self.in_ram = [e for e, owner in enumerate(owners) if inclusive or owner == CPU]
        self.number_of = {expert: number for number, expert in enumerate(self.in_ram)}  # number in RAM
        self.cpu_computes = CPU in self.owners
        count = len(self.in_ram)
        self._biases = GatedBiases(experts, of.hidden, of.width) if of.bias else None
        in_ram = GatedBiases(count, of.hidden, of.width) if of.bias and count < experts else self._biases
        self.stacks = (
            GatedStacks(
                ram, count, of.hidden, of.width, in_ram, of.gating, self._up_stored, self._down_stored
            )
            if count
            else None
        )  # fmt: skip

    @property
    def shape(self) -> ExpertShape:
        """The shape of each expert, on the device and in RAM."""
        up, down = kept_form(self._up_stored, self.hidden), kept_form(self._down_stored, self.width)
        return ExpertShape(self.hidden, self.width, up, down, ACTIVATIONS[self._gating.kind], self._gating.limit)

    @cached_property
    def biases(self) -> Biases | None:
        """All experts' biases, copied to the device at the first access, which must come after loading."""
        if self._biases is None:
            return None
        return Biases(*(t.flatten(1).to(self._device) for t in (self._biases.up, self._biases.down)))

    @cached_property
    def slots(self) -> ExpertSlots:
        return ExpertSlots(self.shape, self._resident, self._device)

    def parameters(self) -> Parameters:
        for e in range(self.experts):
            if self.stacks is not None and e in self.number_of:
                sinks = self.stacks.weight_sinks(self.number_of[e])
            elif self.owners[e] == self.rank:
                sinks = self._slot_sinks(e)
            else:
                continue
            yield from ((f"{e}.{name}", sink) for name, sink in sinks)
            if self._biases is not None:
                yield from ((f"{e}.{name}", sink) for name, sink in self._biases.sinks(e))

    def _slot_sinks(self, expert: int) -> Parameters:
        """Sinks for gate.weight, up.weight and down.weight of an expert that only the device holds."""
        up, down = self._up_stored.add, self._down_stored.add
        sizes = ((self.width, self.hidden, up), (self.width, self.hidden, up), (self.hidden, self.width, down))
        for part, (rows, columns, expect) in enumerate(sizes):

            def where(part: int = part) -> tuple[Tensor, Form]:
                of = self.slots.shape
                return self.slots.panels(expert)[part], of.down_form if part == 2 else of.up_form

            yield f"{('gate', 'up', 'down')[part]}.weight", DevicePanels(rows, columns, expect, where, self._staging)

    def fill_slots(self) -> None:
        """After loading: copy to the slots the experts that RAM holds too, and biases to the CPU's stacks."""
        for expert, number in self.number_of.items():
            self.bring_bias(expert, number)
        for expert, slot in self.slots.slot_of.items():
            if expert in self.number_of:
                for to, packed in self.slots.slot(slot).parts(*self.in_place(self.number_of[expert])):
                    to.copy_(packed)

    def bring_bias(self, expert: int, number: int) -> None:
        """Copy an expert's biases to its number in RAM, which it has from now on. No job may be under way."""
        in_ram = self.stacks.biases if self.stacks is not None else None
        if self._biases is not None and in_ram is not None and in_ram is not self._biases:
            in_ram.up[number], in_ram.down[number] = self._biases.up[expert], self._biases.down[expert]

    def in_place(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Packed bytes of an expert in RAM, uint8, in pieces: (gate and up, down). They keep the memory allocated."""
        if self.stacks is None:
            raise ValueError("RAM has no expert of this layer")
        up, down = (_spans(stack, number) for stack in (self.stacks.up, self.stacks.down))
        return up, down

    def pieces(self) -> tuple[list[Piece], list[Piece]]:
        """The pieces of the first expert in RAM, in panel order; those of the others follow in strides: (gate and up,
        down)."""
        if self.stacks is None:
            raise ValueError("RAM has no expert of this layer")
        return self.stacks.up.pieces(0), self.stacks.down.pieces(0)

    def addresses(self, number: int) -> tuple[int, int]:
        """Tagged addresses (ops/pieces.py) of an expert in RAM, for the device's kernels: (gate and up, down)."""
        if self.stacks is None:
            raise ValueError("RAM has no expert of this layer")
        up, down = (_address(stack, rows, number) for stack, rows in self._found_in)
        return up, down

    @property
    def in_pieces(self) -> bool:
        """True if experts in RAM are split over several memory nodes."""
        return any(rows is not None for _, rows in self._found_in)

    @cached_property
    def _found_in(self) -> list[tuple[Stack, Tensor | None]]:
        """The stacks of gate and up and of down, each with its pieces' addresses on the device, a row for each expert;
        None: experts lie in one piece."""
        if self.stacks is None:
            return []
        return [
            (stack, _rows(stack, len(self.in_ram), of, self._device))
            for stack, of in ((self.stacks.up, self.shape.up), (self.stacks.down, self.shape.down))
        ]


def _spans(stack: Stack, index: int) -> list[Tensor]:
    return [_span(stack, piece) for piece in stack.pieces(index)]


def _span(stack: Stack, piece: Piece) -> Tensor:
    array = (ctypes.c_uint8 * piece.nbytes).from_address(piece.address)
    array._stack = stack  # type: ignore[attr-defined]  # keeps the memory while the tensor lives
    return torch.frombuffer(array, dtype=torch.uint8)


def _rows(stack: Stack, count: int, of: Layout, device: torch.device) -> Tensor | None:
    if len(stack.pieces(0)) == 1:
        return None
    rows = [row_of(stack.pieces(number), of) for number in range(count)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _address(stack: Stack, rows: Tensor | None, number: int) -> int:
    return stack.pieces(number)[0].address if rows is None else rows[number].data_ptr() + TAG
