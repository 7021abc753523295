"""Experts that a prompt made hot take the slots of cold ones: from the ring of streamed prefill, without crossing PCIe
again, and a few from RAM. Belongs here: the copies to slots, and when they are right. Never: which experts swap
(machine/cost/heat.py), other moves (moves.py).

Once the experts of a group of layer l have been launched for all chunks of a pass, kernels copy promoted experts from
the bank to slots, on the stream of the steps. The bank is overwritten only behind that (`Streaming.leave` marks it free
after it). However a pass is divided, heat needs the layer's choices: those of a routed layer are known. Else the counts
on the device are fetched before the launch of the last chunk's experts, and the host waits for them behind that launch,
while the device computes it. Choices that a look has returned before, between two parts of the pass, are subtracted.

Where RAM has a copy of every expert, the evicted one need not be saved. Its slot is overwritten, without a spare one,
and the host's tables change at once: from the next `publish` on, that is before the next launch of a step. Why no
launch reads half a copy: decode steps and this pass take turns, so that the device computes their launches in one order
(a pass that runs beside decode steps takes no slots: Streaming.begin). Those launched before the copies end before
these begin: decode steps, earlier passes, and layer l of this pass, which reads these slots for the last time: all its
chunks come before, and of several groups only the first reads slots, the others' tables have none. Those launched after
it see the new tables or, in this pass, those of later layers, whose slots are others. No copy writes to RAM, so a late
worker of the CPU reads what it should. A pass that is given up leaves complete swaps behind.

Before a pass knows which experts are hot, it leaves some of them to the CPU, so that no bank has them. Where RAM has a
copy of every expert, the hottest of these are copied from there, behind the layer's launches and before the copies of
the next group. No table names such a slot from the next `publish` on, until a step finds that the copy has arrived.

Elsewhere a promoted expert gets a spare slot, and the rest is a move like others, after the pass: no table changes and
no slot that a table names is written before.

Experts of moves that are under way are not movable, so their slots are neither taken nor given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from proa.hybrid.counting import Counting
from proa.hybrid.moves import Moves
from proa.hybrid.ring import Ring
from proa.hybrid.uploads import Transfer, Uploads, transfers_of
from proa.machine.cost.heat import Swap
from proa.ops.host_block import copy_on_device

# Swaps of a layer in a pass, at most: 64 experts of 9.4 MB are 1.2 GB read and written, some 0.4 ms on an H100. With 16
# the first 64 tokens after a prompt hit 69 % in VRAM instead of 72, and 1.4 GB of swaps were left to them.
MOST_SWAPS = 64
# A layer may fetch one hot expert from RAM for so many that it copies for the prompt, which is 12 % longer at most.
# With 16 the first 64 tokens after a prompt hit 70 % in VRAM, with 8 72 %, as later ones do (decision 084).
COPIES_PER_FETCH = 8


class Promotions:
    def __init__(self, moves: Moves, ring: Ring, counting: Counting, uploads: Uploads[Any], top_k: int) -> None:
        self._moves, self._ring, self._counting, self._uploads, self._top_k = moves, ring, counting, uploads, top_k

    def counts(self, layer: int) -> Tensor:
        """The device's counts of the layer's choices, int32 [experts]."""
        return self._moves.tables.counts[layer, : self._moves.layers[layer].experts]

    def unseen(self, layer: int, counts: NDArray[np.int32]) -> NDArray[np.int64]:
        """The layer's choices that heat does not know. counts: the values of `counts`."""
        return self._counting.unseen(layer, counts)

    def take(
        self, layer: int, experts: Sequence[int], bank: int, chosen: NDArray[np.int64], *, fetches: bool
    ) -> int:  # fmt: skip
        """Launch the swaps of a layer whose experts of this group have been launched for all chunks, and start those
        that cross PCIe. experts: those in the bank, in its order; chosen: choices of each that heat does not know yet;
        fetches: experts that are not in the bank may be copied from RAM, if RAM has all. Returns the number of swaps.
        """
        tokens = round(int(chosen.sum()) / self._top_k)
        moves, place = self._moves, {expert: number for number, expert in enumerate(experts)}
        most = MOST_SWAPS if moves.inclusive else min(MOST_SWAPS, moves.room(layer))
        others = len(experts) // COPIES_PER_FETCH if fetches and moves.inclusive else 0
        swaps = moves.swaps_among(layer, experts, chosen, tokens, most, others)
        for swap in swaps:
            if swap.promote not in place:
                self._fetch(swap)
                continue
            slot = moves.replace(swap) if moves.inclusive else moves.reserve(swap)
            up, down = self._ring.matrices(layer, bank, place[swap.promote])
            copy_on_device(up, slot.up)
            copy_on_device(down, slot.down)
        return len(swaps)

    def _fetch(self, swap: Swap) -> None:
        """Start to copy an expert from RAM to its new slot, behind all launches so far, which may read the slot."""
        moves, slot = self._moves, self._moves.vacate(swap)
        number = int(moves.tables.numbers(swap.layer, [swap.promote])[0])
        transfers = list[Transfer]()
        for pieces, to in zip(moves.layers[swap.layer].pieces(), (slot.up, slot.down), strict=True):
            transfers += transfers_of([number], pieces, to.data_ptr())
        moves.arrives(swap, slot, self._uploads.start(transfers, self._uploads.mark(), (moves.layers, slot)))
