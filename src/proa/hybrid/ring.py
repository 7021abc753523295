"""Device memory that experts in RAM are copied to while a prompt passes through the layers. Never: choosing experts,
copying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.hybrid.layer_memory import LayerMemory
from proa.ops.sizes import RING_BANKS, bank_bytes, ring_groups


@dataclass(frozen=True)
class Bank:
    """Memory for `room` of a layer's experts: number i has gate and up at address up + i * up_bytes, down likewise, so
    that experts that are neighbours in RAM are copied at once."""

    up: int
    down: int
    up_bytes: int
    down_bytes: int
    room: int

    @property
    def strides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(first address, bytes of each) of gate and up, and of down."""
        return (self.up, self.up_bytes), (self.down, self.down_bytes)


@dataclass(frozen=True)
class Group:
    """Experts of a layer that are in a bank together. number, of: of so many groups of the layer."""

    layer: int
    number: int
    of: int
    experts: list[int]


def groups_of(layer: int, experts: Sequence[int], count: int) -> list[Group]:
    """Divide the experts into `count` groups, as equal as possible."""
    cuts = [len(experts) * i // count for i in range(count + 1)]
    return [Group(layer, i, count, list(experts[cuts[i] : cuts[i + 1]])) for i in range(count)]


class Ring:
    """Two banks, used in turn: while kernels read experts in one bank, the next ones arrive in the other. A bank holds
    as many experts of a layer as fit: experts of any size, and one group of them if not all fit."""

    def __init__(self, layers: Sequence[LayerMemory], nbytes: int, device: torch.device) -> None:
        """nbytes: of both banks. Raises ValueError if a bank holds no expert of some layer."""
        self.bank_bytes = bank_bytes(nbytes)
        self._memory = torch.empty(RING_BANKS, self.bank_bytes, dtype=torch.uint8, device=device)
        self._banks = [[self._bank(layer, bank) for bank in range(RING_BANKS)] for layer in layers]

    def _bank(self, layer: LayerMemory, bank: int) -> Bank:
        shape, first = layer.shape, self._memory[bank].data_ptr()
        up_bytes, down_bytes = shape.up.matrix_bytes, shape.down.matrix_bytes
        room = min(layer.experts, self.bank_bytes // (up_bytes + down_bytes))
        if room < 1:
            raise ValueError(f"a bank of {self.bank_bytes} bytes holds no expert of {up_bytes + down_bytes} bytes")
        return Bank(first, first + room * up_bytes, up_bytes, down_bytes, room)

    def groups(self, layer: int, experts: int) -> int:
        """Number of groups in which so many experts of the layer are in a bank one after the other; 1 for none."""
        bank = self._banks[layer][0]
        return ring_groups(experts, bank.up_bytes + bank.down_bytes, self.bank_bytes)

    def bank(self, layer: int, number: int) -> Bank:
        """Bank `number` as the layer uses it."""
        return self._banks[layer][number]

    def matrices(self, layer: int, number: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed bytes, uint8, of the layer's expert at this place of bank `number`: (gate and up, down)."""
        bank = self._banks[layer][number]
        firsts = (expert * bank.up_bytes, bank.room * bank.up_bytes + expert * bank.down_bytes)
        up, down = (
            self._memory[number, first : first + nbytes]
            for first, nbytes in zip(firsts, (bank.up_bytes, bank.down_bytes), strict=True)
        )
        return up, down
