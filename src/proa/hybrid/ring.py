"""Device memory that experts in RAM are copied to while a prompt passes through the layers. Never: choosing experts,
copying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.hybrid.layer_memory import LayerMemory
from proa.ops.sizes import RING_ALIGNMENT_BYTES, RING_BANKS


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


class Ring:
    """Two banks, used by layers in turn: while kernels read one layer's experts in one bank, those of the next layer
    arrive in the other. A bank holds as many experts of a layer as fit: experts of any size."""

    def __init__(self, layers: Sequence[LayerMemory], nbytes: int, device: torch.device) -> None:
        """nbytes: of both banks."""
        self.bank_bytes = nbytes // RING_BANKS // RING_ALIGNMENT_BYTES * RING_ALIGNMENT_BYTES
        self._memory = torch.empty(RING_BANKS, self.bank_bytes, dtype=torch.uint8, device=device)
        self._banks = [[self._bank(layer, bank) for bank in range(RING_BANKS)] for layer in layers]

    def _bank(self, layer: LayerMemory, bank: int) -> Bank:
        shape, first = layer.shape, self._memory[bank].data_ptr()
        up_bytes, down_bytes = shape.up.matrix_bytes, shape.down.matrix_bytes
        room = min(layer.experts, self.bank_bytes // (up_bytes + down_bytes))
        return Bank(first, first + room * up_bytes, up_bytes, down_bytes, room)

    def bank(self, layer: int, number: int) -> Bank:
        """Bank `number` as the layer uses it."""
        return self._banks[layer][number]
