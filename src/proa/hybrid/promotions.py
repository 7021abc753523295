"""Experts that a prompt made hot take the slots of cold ones, from the ring of streamed prefill, without crossing PCIe
again. Belongs here: the copies from bank to slot, and when they are right. Never: which experts swap
(machine/cost/heat.py), other moves (moves.py).

Only where RAM has a copy of every expert: then the evicted one need not be saved, and its slot is overwritten at once,
without a spare slot. In a pass of one chunk, once the experts of layer l have been launched:

1. kernels copy the promoted experts from the bank to the slots of the evicted ones, on the stream of the steps;
2. the host's tables map the promoted experts to the GPU and the evicted ones to the CPU: from the next `publish` on,
   that is from the next launch of a step, before which it is sent on the same stream.

Why no launch reads half a copy: all steps and passes are launched on one stream. Those launched before the copies end
before these begin: decode steps, earlier passes, and layer l of this pass, which reads these slots for the last time.
Those launched after it see the tables of 2, or, of this pass, tables of later layers, whose slots are others. The bank
is overwritten only behind the copies (`Streaming.leave` marks it free after them). No copy writes to RAM, so a late
worker of the CPU reads what it should.
Moves that are under way (moves.py) keep their experts: these are not movable, and their slots are neither taken nor
given. A pass that is given up leaves complete swaps behind.
If decode steps were launched on a second stream, 1 would have to wait for those in flight, and they for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from proa.hybrid.moves import Moves
from proa.hybrid.ring import Ring
from proa.ops.host_block import copy_on_device

# Swaps of a layer in a pass, at most: 16 experts of 9.4 MB are read and written in some 0.1 ms on an H100.
MOST_SWAPS = 16


class Promotions:
    def __init__(self, moves: Moves, ring: Ring) -> None:
        """Raises ValueError unless RAM has a copy of every expert."""
        if not moves.inclusive:
            raise ValueError("an evicted expert must have a copy in RAM")
        self._moves, self._ring = moves, ring

    def take(self, layer: int, experts: Sequence[int], bank: int, chosen: NDArray[np.int64], tokens: int) -> int:
        """Launch the swaps of a layer whose last experts of a pass have been launched. experts: those in the bank, in
        its order; chosen: by `tokens` tokens, of each expert. Returns their number."""
        place = {expert: number for number, expert in enumerate(experts)}
        swaps = self._moves.swaps_among(layer, experts, chosen, tokens, MOST_SWAPS)
        for swap in swaps:
            slot = self._moves.replace(swap)
            up, down = self._ring.matrices(layer, bank, place[swap.promote])
            copy_on_device(up, slot.up)
            copy_on_device(down, slot.down)
        return len(swaps)
