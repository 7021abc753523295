"""The residency tables of a model's layers: what a step reads on the device, and a copy on the host that is edited.

`publish` copies the layers that changed, on the stream of the next step: steps launched before read what was. Never:
deciding, weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.slots import Slot
from proa.ops.residency import IN_PLACE_PAIRS, InPlace, Residency
from proa.ops.sizes import ADDRESSES, table_words

# int64 of each expert (ADDRESSES): of up and down for the GPU, of up and down in RAM.


class Tables:
    """Made when weights are where they start; `residency[i]` is layer i's, at addresses that stay.

    counts int32 [layers, experts of the largest]: how often each was chosen so far, modulo 2^32, if steps count that.
    `in_place`: the GPU can read RAM.
    """

    def __init__(self, layers: Sequence[LayerMemory], device: torch.device, *, counted: bool, in_place: bool) -> None:
        self.experts = max((layer.experts for layer in layers), default=0)
        self._layers, self._in_place = layers, in_place
        words = table_words(self.experts)
        self._host = torch.zeros(len(layers), words, dtype=torch.int32)
        self._device = torch.zeros(len(layers), words, dtype=torch.int32, device=device)
        self.counts = torch.zeros(len(layers), self.experts, dtype=torch.int32, device=device)
        self._host_share = torch.zeros(IN_PLACE_PAIRS + 1, dtype=torch.int32)
        self._share = torch.zeros(IN_PLACE_PAIRS + 1, dtype=torch.int32, device=device)
        of_addresses, of_numbers = _split(self._host, self.experts)
        self._addresses, self._numbers = of_addresses.numpy(), of_numbers.numpy()
        self._changed: set[int] = set()
        self._share_changed = False
        for i, layer in enumerate(layers):
            for expert, number in layer.number_of.items():
                self.to_cpu(i, expert, number)
            for expert, slot in layer.slots.slot_of.items():
                self.to_gpu(i, expert, layer.slots.slot(slot))
        self._changed.clear()
        self._device.copy_(self._host)  # which waits: steps run on another stream
        addresses, numbers = _split(self._device, self.experts)
        self.residency = []
        for i, layer in enumerate(layers):
            up, down, up_place, down_place = addresses[i, :, : layer.experts]
            counts = self.counts[i, : layer.experts] if counted else None
            places = InPlace(up_place, down_place, self._share, layers[i].in_pieces) if in_place else None
            self.residency.append(Residency(up, down, numbers[i, : layer.experts], counts, places))

    @property
    def on_device(self) -> NDArray[np.bool_]:
        """[layers, experts of the largest]: who is the device's as things stand on the host."""
        return self._numbers < 0

    def to_gpu(self, layer: int, expert: int, slot: Slot) -> None:
        """From the next `publish` on, the GPU computes the expert, from this slot."""
        self._set(layer, expert, (slot.up.data_ptr(), slot.down.data_ptr(), 0, 0), -1)

    def to_cpu(self, layer: int, expert: int, number: int) -> None:
        """From the next `publish` on, the CPU computes the expert, which it has under this number."""
        places = self._layers[layer].addresses(number) if self._in_place else (0, 0)
        self._set(layer, expert, (0, 0, *places), number)

    def _set(self, layer: int, expert: int, addresses: tuple[int, int, int, int], number: int) -> None:
        self._addresses[layer, :, expert] = addresses
        self._numbers[layer, expert] = number
        self._changed.add(layer)

    def share(self, of_misses: Sequence[int]) -> None:
        """From the next `publish` on, of m misses of a step of few tokens the GPU reads of_misses[m] in place; none of
        more."""
        self._host_share.zero_()
        self._host_share[: len(of_misses)] = torch.tensor(of_misses)
        self._share_changed = True

    def publish(self) -> None:
        """On the current stream, before a step."""
        for layer in sorted(self._changed):
            _send(self._host[layer], self._device[layer])
        self._changed.clear()
        if self._share_changed:
            _send(self._host_share, self._share)
            self._share_changed = False


def _send(row: Tensor, to: Tensor) -> None:
    """As it is now, whatever the host writes to it afterwards: a GPU gets it from pinned memory, which torch uses for
    something else only once the copy is over."""
    to.copy_(row.pin_memory() if to.is_cuda else row, non_blocking=True)


def _split(rows: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Of int32 rows: addresses int64 [layers, ADDRESSES, experts], numbers int32 [layers, experts]."""
    words = 2 * ADDRESSES * experts
    return rows[:, :words].view(torch.int64).view(len(rows), ADDRESSES, experts), rows[:, words : words + experts]
