"""Device memory that experts in RAM are copied to while a prompt passes through the layers. Never: choosing experts,
copying."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.slots import Slot

BANKS = 2
ALIGNMENT_BYTES = 256  # of slots: kernels read panels in vectors of 16 bytes, DMA in larger bursts


class Ring:
    """Two banks, used by layers in turn: while kernels read one layer's experts in one bank, those of the next layer
    arrive in the other. A bank holds as many experts of a layer as fit: experts of any size."""

    def __init__(self, layers: Sequence[LayerMemory], nbytes: int, device: torch.device) -> None:
        """nbytes: of both banks."""
        self._layers = layers
        self.bank_bytes = nbytes // BANKS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._banks = torch.empty(BANKS, self.bank_bytes, dtype=torch.uint8, device=device)

    def room(self, layer: int) -> int:
        """Number of the layer's experts that a bank holds."""
        return self.bank_bytes // slot_bytes(self._layers[layer])

    def slot(self, layer: int, bank: int, number: int) -> Slot:
        """Memory for one of the layer's experts, `number` < room(layer)."""
        of, size = self._layers[layer].shape, slot_bytes(self._layers[layer])
        memory = self._banks[bank, number * size : (number + 1) * size]
        up, down = of.up.matrix_bytes, of.down.matrix_bytes
        return Slot(
            memory[:up].view(of.up.panels, of.up.panel_bytes),
            memory[up : up + down].view(of.down.panels, of.down.panel_bytes),
        )


def slot_bytes(layer: LayerMemory) -> int:
    """Bytes of one of the layer's experts in the ring."""
    nbytes = layer.shape.up.matrix_bytes + layer.shape.down.matrix_bytes
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
