"""The residency tables of a model's layers: what a step reads on the device, and a copy on the host that is edited.

Between steps alone: `publish` copies the layers that changed, on the stream of the next step. Never: deciding, weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.slots import Slot
from proa.ops.residency import Residency

_INT64S, _INT32S = 2, 1  # words of an expert: addresses of up and down; its number on the CPU


class Tables:
    """Made when weights are where they start; `residency[i]` is layer i's, at addresses that stay.

    counts int32 [layers, experts of the largest]: how often each was chosen so far, modulo 2^32, if steps count that.
    """

    def __init__(self, layers: Sequence[LayerMemory], device: torch.device, *, counted: bool) -> None:
        self.experts = max((layer.experts for layer in layers), default=0)
        words = -(-self.experts * (2 * _INT64S + _INT32S) // 4) * 4  # rows begin on 16 bytes
        self._host = torch.zeros(len(layers), words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(len(layers), words, dtype=torch.int32, device=device)
        self.counts = torch.zeros(len(layers), self.experts, dtype=torch.int32, device=device)
        self.residency = [
            replace(self._views(row, layer.experts), counts=counts[: layer.experts] if counted else None)
            for row, counts, layer in zip(self._device, self.counts, layers, strict=True)
        ]
        self._mine = [self._views(row, layer.experts) for row, layer in zip(self._host, layers, strict=True)]
        self._changed: set[int] = set()
        for i, layer in enumerate(layers):
            for expert, number in layer.number_of.items():
                self.to_cpu(i, expert, number)
            for expert, slot in layer.slots.slot_of.items():
                self.to_gpu(i, expert, layer.slots.slot(slot))
        self._changed.clear()
        self._device.copy_(self._host)  # which waits: steps run on another stream

    def _views(self, row: Tensor, experts: int) -> Residency:
        most = self.experts
        up, down = row[: 2 * _INT64S * most].view(torch.int64).view(_INT64S, most)[:, :experts]
        return Residency(up, down, row[2 * _INT64S * most :][:experts])

    def to_gpu(self, layer: int, expert: int, slot: Slot) -> None:
        """From the next `publish` on, the GPU computes the expert, from this slot."""
        self._set(layer, expert, slot.up.data_ptr(), slot.down.data_ptr(), -1)

    def to_cpu(self, layer: int, expert: int, number: int) -> None:
        """From the next `publish` on, the CPU computes the expert, which it has under this number."""
        self._set(layer, expert, 0, 0, number)

    def _set(self, layer: int, expert: int, up: int, down: int, number: int) -> None:
        mine = self._mine[layer]
        mine.up[expert], mine.down[expert], mine.cpu[expert] = up, down, number
        self._changed.add(layer)

    def publish(self) -> None:
        """On the current stream, before a step. No former `publish` may be under way."""
        for layer in sorted(self._changed):
            self._device[layer].copy_(self._host[layer], non_blocking=True)
        self._changed.clear()
