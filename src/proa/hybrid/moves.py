"""Experts that change places while steps run: the GPU gets what is hot. Belongs here: the order of copies and table
entries, by which every expert can be read by somebody in every step. Never: what is hot (heat.py), steps.

A slot more than the resident experts need is spare, anywhere on the device: tables hold addresses. It serves any layer
whose experts have its size. A move is
1. a copy of the newcomer from RAM to a spare slot, beside any number of steps, of which none reads that slot;
2. once it has arrived, before the next step: the tables say that the GPU has the newcomer. If RAM has a copy of the
   evicted expert they say as well that the CPU has that, and its slot is to be spare: this was all.
3. Else no later step reads the newcomer's place in RAM any more, and a second copy brings the evicted expert there from
   its slot, which the GPU still reads;
4. once it has arrived, before the next step: the tables say that the CPU has it, under the newcomer's former number.

Why no step sees half of it: tables change on the steps' stream, between two steps. Those launched before may be under
way still, and read what the tables named then: a slot or a place that they name no longer is written only once all of
those have ended. (A worker of the CPU that is late may read such a place even then; what it made of that is dropped.)
A step waits for no copy and for no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from proa.hybrid.copies import Copier, Copy
from proa.hybrid.counting import Seen
from proa.hybrid.heat import Heat, Swap
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.slots import Slot
from proa.hybrid.tables import Tables

_Size = tuple[int, int]  # bytes of gate and up, and of down: a slot serves any format of its size


@dataclass
class _Move:
    swap: Swap
    slot: Slot  # the newcomer's
    copy: Copy | None
    came: int | None = None  # the first step that found the newcomer on the device; from then on the evicted one leaves


@dataclass
class Moved:
    """Since the start."""

    experts: int = 0  # promoted, each for another one
    nbytes: int = 0  # copied both ways


@dataclass
class _Where:
    """A layer's experts: slots of those on the GPU, numbers of those in RAM."""

    slot_of: dict[int, Slot]
    number_of: dict[int, int]


class Moves:
    """`spare` slots for each size of experts bound how many move at once. One thread calls."""

    def __init__(
        self, layers: Sequence[LayerMemory], tables: Tables, spare: int, inclusive: bool, copier: Copier
    ) -> None:
        self.moved = Moved()
        self.layers, self.tables, self._inclusive, self._copier = layers, tables, inclusive, copier
        self._spare: dict[_Size, list[Slot]] = {}
        self._left: list[tuple[int, _Size, Slot]] = []  # and the first step whose tables do not name the slot
        self._size = [(layer.shape.up.matrix_bytes, layer.shape.down.matrix_bytes) for layer in layers]
        for layer, size in zip(layers, self._size, strict=True):
            if size not in self._spare:
                self._spare[size] = [_empty(layer) for _ in range(spare)]
        self._where = [
            _Where({e: layer.slots.slot(slot) for e, slot in layer.slots.slot_of.items()}, dict(layer.number_of))
            for layer in layers
        ]
        self._resident = np.zeros((len(layers), tables.experts), bool)
        self._movable = np.zeros_like(self._resident)
        for i, layer in enumerate(layers):
            self._movable[i, : layer.experts] = True
            self._resident[i, list(layer.slots.slot_of)] = True
        self._moves: list[_Move] = []
        self._ended = 0
        self.heat = Heat(tables.experts, self._resident.sum(1).tolist())

    def resident(self, layer: int) -> list[int]:
        """Who is on the GPU, or about to leave it."""
        return np.flatnonzero(self._resident[layer]).tolist()

    def before(self, step: int, ended: int) -> None:
        """This step is launched next, after its tables are published; they are counted from 1. Of those before it the
        first `ended` have ended."""
        self._ended = ended
        self._moves = [
            move for move in self._moves if not (move.copy and move.copy.done() and self._is_over(move, step))
        ]
        for since, size, slot in self._left:
            if self._unread(since):
                self._spare[size].append(slot)
        self._left = [left for left in self._left if not self._unread(left[0])]

    def meanwhile(self, seen: Seen | None) -> None:
        """A step is under way, or has just been: start copies. `seen`: what steps chose since the last call."""
        for move in self._moves:
            if move.copy is None and move.came is not None and self._unread(move.came):
                move.copy = self._copier.start(self._out_pairs(move))
        if seen is not None:
            self.heat.observe(seen.chosen, seen.tokens, self._resident)
        if not any(self._spare.values()):
            return
        for swap in self.heat.swaps(self._resident, self._movable):
            spare = self._spare[self._size[swap.layer]]
            if spare:
                self._start(swap, spare.pop())

    def _unread(self, since: int) -> bool:
        """Whether all steps have ended that read what the tables do not name from step `since` on."""
        return self._ended >= since - 1

    def close(self) -> None:
        self._copier.close()

    def _start(self, swap: Swap, slot: Slot) -> None:
        layer, number = self.layers[swap.layer], self._where[swap.layer].number_of[swap.promote]
        pairs = slot.parts(*layer.in_place(number))
        self._movable[swap.layer, [swap.promote, swap.evict]] = False
        self._moves.append(_Move(swap, slot, self._copier.start(pairs)))
        self.moved.nbytes += sum(to.nbytes for to, _ in pairs)

    def _out_pairs(self, move: _Move) -> list[tuple[torch.Tensor, torch.Tensor]]:
        swap, where = move.swap, self._where[move.swap.layer]
        place = self.layers[swap.layer].in_place(where.number_of[swap.promote])
        pairs = [(packed, here) for here, packed in where.slot_of[swap.evict].parts(*place)]
        self.moved.nbytes += sum(to.nbytes for to, _ in pairs)
        return pairs

    def _is_over(self, move: _Move, step: int) -> bool:
        """A copy has ended: what follows from this step on, and whether that was the last."""
        swap, where = move.swap, self._where[move.swap.layer]
        if move.came is None:
            where.slot_of[swap.promote] = move.slot
            self.tables.to_gpu(swap.layer, swap.promote, move.slot)
            self._resident[swap.layer, swap.promote] = True
            move.came, move.copy = step, None
            if not self._inclusive:
                return False
        if not self._inclusive:
            where.number_of[swap.evict] = where.number_of.pop(swap.promote)
        self.layers[swap.layer].bring_bias(swap.evict, where.number_of[swap.evict])
        self.tables.to_cpu(swap.layer, swap.evict, where.number_of[swap.evict])
        self._resident[swap.layer, swap.evict] = False
        self._movable[swap.layer, [swap.promote, swap.evict]] = True
        self._left.append((step, self._size[swap.layer], where.slot_of.pop(swap.evict)))
        self.moved.experts += 1
        return True


def _empty(layer: LayerMemory) -> Slot:
    device = layer.slots.up.device
    up, down = (
        torch.empty(of.panels, of.panel_bytes, dtype=torch.uint8, device=device)
        for of in (layer.shape.up, layer.shape.down)
    )
    return Slot(up, down)
