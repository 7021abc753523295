"""The residency tables of a model's layers: the device's copy, which steps read, and the host's, which is edited.

`publish` copies the layers that changed, on the stream of the next step: steps launched before see the former tables.
Kernels read the copies from pinned memory: a copy engine would take them behind all experts that are under way.
Never: deciding, weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.slots import Slot
from proa.models.ranks import CPU
from proa.ops.host_block import HostBlock, Sender
from proa.ops.residency import IN_PLACE_PAIRS, InPlace, Residency
from proa.ops.sizes import ADDRESSES, table_words

DRAFTS = 2  # the row of the next layer is drafted while the device may still read that of the layer before


class Tables:
    """Made after loading. `residency[i]`: the table of layer i, at fixed addresses, as graphs need.

    owners: int32 [layers, experts of the largest layer], by the host's tables: the rank that computes the expert, or
    CPU. An expert of another rank is computed neither by this device nor by the CPU: it has no address and no number.

    counts: int32 [layers, experts of the largest layer], choices of each expert so far, modulo 2^32, if `counted`; else
    those of passes of prompts, if their own tables count (Overlay).
    in_place: the GPU can read experts in RAM.
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
        self._rows, self._addresses, self._numbers = self._host.numpy(), of_addresses.numpy(), of_numbers.numpy()
        self.owners = np.full(self._numbers.shape, CPU, np.int32)
        self._changed: set[int] = set()
        self._share_changed = False
        self.sender = Sender()
        for i, layer in enumerate(layers):
            for expert, owner in enumerate(layer.owners):
                if owner == layer.rank:
                    self.to_gpu(i, expert, layer.slots.slot(layer.slots.slot_of[expert]))
                elif owner == CPU:
                    self.to_cpu(i, expert, layer.number_of[expert])
                else:
                    self._set(i, expert, (0, 0, 0, 0), -1, owner)
        self._changed.clear()
        self._device.copy_(self._host)  # synchronous: steps run on another stream
        self.counted = counted
        self.residency = self.views(self._device, in_place=in_place, counted=counted)

    def empty_rows(self) -> Tensor:
        """New memory for a set of tables on the device."""
        return torch.zeros_like(self._device)

    def views(self, rows: Tensor, *, in_place: bool, counted: bool) -> list[Residency]:
        """The layers' tables in `rows`, memory of `empty_rows`. in_place: with the experts' addresses in RAM; counted:
        choices that are located by these tables are counted."""
        addresses, numbers = _split(rows, self.experts)
        found = []
        for i, layer in enumerate(self._layers):
            up, down, up_place, down_place = addresses[i, :, : layer.experts]
            counts = self.counts[i, : layer.experts] if counted else None
            places = InPlace(up_place, down_place, self._share, layer.in_pieces) if in_place else None
            found.append(Residency(up, down, numbers[i, : layer.experts], counts, places))
        return found

    def to_gpu(self, layer: int, expert: int, slot: Slot) -> None:
        """From the next `publish` on, the GPU computes the expert, in this slot."""
        self._set(layer, expert, (slot.up.data_ptr(), slot.down.data_ptr(), 0, 0), -1, self._layers[layer].rank)

    def to_cpu(self, layer: int, expert: int, number: int) -> None:
        """From the next `publish` on, the CPU computes the expert, under this number in RAM."""
        places = self._layers[layer].addresses(number) if self._in_place else (0, 0)
        self._set(layer, expert, (0, 0, *places), number, CPU)

    def _set(self, layer: int, expert: int, addresses: tuple[int, int, int, int], number: int, owner: int) -> None:
        self._addresses[layer, :, expert] = addresses
        self._numbers[layer, expert], self.owners[layer, expert] = number, owner
        self._changed.add(layer)

    def share(self, of_misses: Sequence[int]) -> None:
        """From the next `publish` on, the GPU reads of_misses[m] of m missed experts in place, in steps with few
        pairs; none for an m beyond."""
        self._host_share.zero_()
        self._host_share[: len(of_misses)] = torch.tensor(of_misses)
        self._share_changed = True

    def publish(self) -> None:
        """Copy changed tables to the device, on the current stream, before a step: all from the first changed layer to
        the last, since launches cost more than bytes."""
        if self._changed:
            layers = slice(min(self._changed), max(self._changed) + 1)
            self.sender.send(self._host[layers], self._device[layers])
            self._changed.clear()
        if self._share_changed:
            self.sender.send(self._host_share, self._share)
            self._share_changed = False

    def numbers(self, layer: int, experts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        """The numbers in RAM of experts that the CPU owns, by the host's tables."""
        found: NDArray[np.int32] = self._numbers[layer, np.asarray(experts, np.int64)]
        return found

    def rows(self) -> Tensor:
        """A copy of the host's tables."""
        return self._host.clone()

    def row(self, layer: int) -> NDArray[np.int32]:
        """The host's table of the layer, as it is."""
        row: NDArray[np.int32] = self._rows[layer]
        return row


@dataclass(frozen=True)
class Elsewhere:
    """Experts of a layer that are in other device memory. up, down: addresses of each. group: the set of tables in
    which they have them."""

    layer: int
    group: int
    experts: Sequence[int]
    up: NDArray[np.int64]
    down: NDArray[np.int64]


class Overlay:
    """More sets of tables, for steps that use other device memory for some experts of the CPU, in groups.

    Set 0 is that of the steps, but these experts are not the CPU's; those of group 0 have their other addresses there.
    Set g > 0 has nothing but the addresses of group g. So each (token, expert) pair is computed once, over all sets.
    `residency[g][i]`: the table of layer i, valid from `publish` on, as long as no expert moves.
    """

    def __init__(self, tables: Tables, sets: int, *, counted: bool) -> None:
        """counted: choices that are located by set 0 are counted."""
        self._tables = tables
        self._device = tables.empty_rows().repeat(sets, 1, 1)
        self.residency = [
            tables.views(rows, in_place=False, counted=counted and number == 0)
            for number, rows in enumerate(self._device)
        ]
        self._of_layer = list(self._device[0])
        self._drafts = deque(Draft(tables.experts, self._device.device) for _ in range(DRAFTS))

    def publish(self, elsewhere: Sequence[Elsewhere]) -> None:
        """Send the sets that `elsewhere` needs, and set 0, in one copy on the current stream."""
        sets = 1 + max((of.group for of in elsewhere), default=0)
        first = self._tables.rows()
        rows = first.new_zeros(sets, *first.shape)
        rows[0] = first
        addresses, numbers = (t.numpy() for t in _split(rows.flatten(0, 1), self._tables.experts))
        addresses, numbers = (t.reshape(sets, len(first), *t.shape[1:]) for t in (addresses, numbers))
        numbers[1:] = -1
        for of in elsewhere:
            _place(addresses[:, of.layer], numbers[:, of.layer], of)
        self._tables.sender.send(rows, self._device[:sets])

    def draft(self, layer: int) -> Draft:
        """The layer's row of set 0 by the host's tables, to be placed in and sent. Valid until the next but one."""
        self._drafts.rotate()
        self._drafts[0].begin(self._tables.row(layer), self._of_layer[layer])
        return self._drafts[0]


class Draft:
    """One layer's row in pinned memory, which a kernel reads where it is: nothing is allocated or copied between the
    last `place` and `send`."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self._block = HostBlock((1, table_words(experts)), torch.int32, device)
        addresses, numbers = _split(self._block.host, experts)
        self._row, self._addresses, self._numbers = self._block.host.numpy(), addresses[0].numpy(), numbers[0].numpy()
        self._to: Tensor | None = None
        self._read: torch.cuda.Event | None = None  # reached once the device has read what was sent last

    def begin(self, row: NDArray[np.int32], to: Tensor) -> None:
        """Wait until the last row has been read, and begin with this one, to be sent to `to`."""
        if self._read is not None:
            self._read.synchronize()
        self._row[0], self._to = row, to[None]

    def place(self, experts: NDArray[np.int64], up: NDArray[np.int64], down: NDArray[np.int64]) -> None:
        """Put these of the CPU's experts elsewhere, at these addresses."""
        self._numbers[experts] = -1
        self._addresses[:, experts] = 0
        self._addresses[0, experts], self._addresses[1, experts] = up, down

    def send(self) -> None:
        """Send the row, on the current stream."""
        if self._to is None:
            raise ValueError("the draft has not begun")
        self._block.copy_to(self._to)
        if self._to.is_cuda:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record()


def _place(addresses: NDArray[np.int64], numbers: NDArray[np.int32], of: Elsewhere) -> None:
    """Put the experts elsewhere in one layer's sets: addresses [sets, ADDRESSES, experts], numbers [sets, experts]."""
    ids = np.asarray(of.experts, np.int64)
    addresses[0][:, ids], numbers[0, ids] = 0, -1
    addresses[of.group, 0, ids], addresses[of.group, 1, ids] = of.up, of.down


def _split(rows: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Split int32 rows into addresses int64 [layers, ADDRESSES, experts], which are up and down on the GPU and up and
    down in RAM, and numbers int32 [layers, experts]."""
    words = 2 * ADDRESSES * experts
    return rows[:, :words].view(torch.int64).view(len(rows), ADDRESSES, experts), rows[:, words : words + experts]
