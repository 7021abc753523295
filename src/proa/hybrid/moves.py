"""Moves of experts between GPU and RAM while steps run: hot experts are promoted, cold ones evicted. Belongs here: the
order of copies and table updates, by which each expert is readable on one side in every step. Never: which experts
swap (machine/cost/heat.py), steps.

Slots beyond those of the resident experts are spare, anywhere on the device: tables hold addresses. A spare slot serves
any layer whose experts have its size. A move is
1. a copy of the promoted expert from RAM to a spare slot, which no step in flight reads;
2. once it has arrived, before the next step: the tables map the promoted expert to the GPU. If RAM has a copy of the
   evicted expert, they also map that one to the CPU, its slot is to become spare, and the move is complete.
3. Otherwise no later step reads the promoted expert's place in RAM, and a second copy brings the evicted expert there
   from its slot, which the GPU still reads;
4. once it has arrived, before the next step: the tables map the evicted expert to the CPU, under the promoted expert's
   former number.

Why no step sees half a move: tables change on the steps' stream, between two steps. Steps launched before may still be
in flight and read what the tables named then: a slot or a place in RAM that tables no longer name is written only once
all of these steps have ended. (A late worker of the CPU may read such a place even then; its result is dropped.)
No step waits for a copy or for a table update.
Experts that a prompt made hot get slots in another way: promotions.py. Slots in lent KV pages: loans.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from proa.hybrid.copies import Copier, Copy
from proa.hybrid.counting import Seen
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.slots import Slot
from proa.hybrid.tables import Tables
from proa.machine.cost.heat import SURE, Heat, Swap, SwapThreshold, choose_arrivals, coldest, swaps_with_room
from proa.models.ranks import CPU

_Size = tuple[int, int]  # bytes (gate and up, down): a slot serves any format of its size


@dataclass
class _Move:
    swap: Swap
    slot: Slot  # the promoted expert's
    copy: Copy | None
    came: int | None = None  # the first step with the promoted expert on the device; then the evicted one is copied out


@dataclass(frozen=True)
class _Arriving:
    swap: Swap
    slot: Slot  # no table names it
    copy: Copy


@dataclass(frozen=True)
class _Left:
    """A slot that no table names from step `since` on. spare: it becomes a spare one, unless its memory is taken
    back."""

    since: int
    size: _Size
    slot: Slot
    spare: bool


class _Launched:
    """A copy on the stream of the steps: work that is launched from now on sees it."""

    def done(self) -> bool:
        return True


_LAUNCHED = _Launched()


@dataclass
class Moved:
    """Sums since the start."""

    experts: int = 0  # swaps: one expert promoted, one evicted
    nbytes: int = 0  # copied in both directions


@dataclass
class _Where:
    """Locations of a layer's experts: slots of the experts on the GPU, numbers of the experts in RAM."""

    slot_of: dict[int, Slot]
    number_of: dict[int, int]


class Moves:
    """spare: slots for each size of experts, which bounds the moves at once. Called by one thread only."""

    def __init__(
        self, layers: Sequence[LayerMemory], tables: Tables, spare: int, inclusive: bool, copier: Copier
    ) -> None:
        self.moved = Moved()
        self.layers, self.tables, self.inclusive, self._copier = layers, tables, inclusive, copier
        self._spare: dict[_Size, list[Slot]] = {}
        self._left: list[_Left] = []
        self.lent: set[int] = set()  # addresses of slots in memory that is taken back later
        self._leaving: set[int] = set()  # of these, those that become free no more
        self._gone: list[int] = []  # of these, those that no step reads any more
        self._owed: dict[_Size, int] = {}  # spare slots that left, and must be replaced by others
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
            # A layer that is whole on the device has no doorbell: the CPU could not compute an expert that leaves.
            own = (CPU, layer.rank) if layer.cpu_computes else ()
            self._movable[i, : layer.experts] = [owner in own for owner in layer.owners]
            self._resident[i, list(layer.slots.slot_of)] = True
        self._moves: list[_Move] = []
        self._arriving: list[_Arriving] = []
        self._ended = 0
        self.heat = Heat(tables.experts, self._resident.sum(1).tolist())

    def resident(self, layer: int) -> list[int]:
        """Ids of the layer's experts on the GPU, with those that are being copied out."""
        return np.flatnonzero(self._resident[layer]).tolist()

    def before(self, step: int, ended: int) -> None:
        """Update tables for moves whose copies have arrived. Call it before step number `step` (from 1) publishes its
        tables and is launched. ended: how many steps have ended, in order."""
        self._ended = ended
        self._moves = [
            move for move in self._moves if not (move.copy and move.copy.done() and self._is_over(move, step))
        ]
        self._arriving = [arriving for arriving in self._arriving if not self._has_arrived(arriving)]
        self._repay(step)
        for left in self._left:
            if self._unread(left.since):
                self._free(left)
        self._left = [left for left in self._left if not self._unread(left.since)]

    def _free(self, left: _Left) -> None:
        if left.slot.address not in self._leaving:
            self._spare[left.size].append(left.slot)
            return
        self._gone.append(left.slot.address)
        if left.spare:
            self._owe(left.size)

    def _owe(self, size: _Size) -> None:
        self._owed[size] = self._owed.get(size, 0) + 1

    def meanwhile(self, seen: Seen | None, *, may_start: bool = True) -> None:
        """Update heat and, if they may start, start copies, beside steps in flight. seen: choices since the last
        call."""
        for move in self._moves if may_start else ():
            if move.copy is None and move.came is not None and self._unread(move.came):
                move.copy = self._copier.start(self._out_pairs(move))
        if seen is not None:
            self.heat.observe(seen.chosen, seen.tokens, self._resident)
        if not may_start or not any(self._spare.values()):
            return
        room = {size: len(slots) for size, slots in self._spare.items()}
        for swap in swaps_with_room(self.heat.swaps(self._resident, self._movable), self._size, room):
            self._start(swap, self._spare[self._size[swap.layer]].pop())

    def swaps_among(
        self, layer: int, experts: Sequence[int], chosen: NDArray[np.int64], tokens: int, most: int, others: int = 0
    ) -> list[Swap]:  # fmt: skip
        """Up to `most` swaps in a layer, by the heat that it will have once the choice of `tokens` tokens is counted;
        0: it has been. chosen: of each expert of the layer. The swaps promote some of `experts`, and up to `others`
        more, of those that are hot beyond the threshold SURE."""
        count = len(chosen)
        heat = self.heat.foreseen(layer, chosen, tokens) if tokens else self.heat.heat[layer, :count]
        among = np.isin(np.arange(count), experts)
        if others:
            hot = self._swaps_of(layer, heat, np.ones(count, bool), most, SURE)
            among[[swap.promote for swap in hot if not among[swap.promote]][:others]] = True
        return self._swaps_of(layer, heat, among, most)

    def _swaps_of(
        self, layer: int, heat: NDArray[np.float32], among: NDArray[np.bool_], most: int,
        threshold: SwapThreshold | None = None,
    ) -> list[Swap]:  # fmt: skip
        """Up to `most` swaps by this heat that promote flagged experts. Arrays: [experts of the layer]. threshold: see
        Heat.swaps_of."""
        resident, movable = self._resident[layer, : len(heat)], self._movable[layer, : len(heat)]
        return self.heat.swaps_of(layer, heat, resident, movable & (resident | among), most, threshold)

    def room(self, layer: int) -> int:
        """Number of spare slots for the layer's experts."""
        return len(self._spare[self._size[layer]])

    def reserve(self, swap: Swap) -> Slot:
        """Start a move into a spare slot, which is returned: the caller copies the promoted expert there at once, on
        the stream of the steps. The rest is as in other moves."""
        slot = self._spare[self._size[swap.layer]].pop()
        self._movable[swap.layer, [swap.promote, swap.evict]] = False
        self._moves.append(_Move(swap, slot, _LAUNCHED))
        return slot

    def replace(self, swap: Swap) -> Slot:
        """From the next `publish` on, the promoted expert is in the evicted one's slot, which is returned, and the CPU
        has the evicted one, whose bytes RAM must have. promotions.py says why the caller may fill the slot at once."""
        slot = self.vacate(swap)
        self._occupy(swap, slot)
        return slot

    def vacate(self, swap: Swap) -> Slot:
        """From the next `publish` on, the CPU has the evicted expert, whose bytes RAM must have, and no table names its
        slot, which is returned. The promoted expert does not move until `arrives`."""
        self._movable[swap.layer, swap.promote] = False
        return self._leave(swap.layer, swap.evict)

    def arrives(self, swap: Swap, slot: Slot, copy: Copy) -> None:
        """The promoted expert is being copied to `slot`, which `vacate` has returned. Before the first step after the
        copy is complete, the tables map the expert to the GPU."""
        self.moved.nbytes += slot.up.nbytes + slot.down.nbytes
        self._arriving.append(_Arriving(swap, slot, copy))

    def _has_arrived(self, one: _Arriving) -> bool:
        """If so, update the tables from this step on."""
        if not one.copy.done():
            return False
        self._occupy(one.swap, one.slot)
        return True

    def _occupy(self, swap: Swap, slot: Slot) -> None:
        self._enter(swap.layer, swap.promote, slot)
        self._movable[swap.layer, swap.promote] = True
        self.moved.experts += 1

    def _enter(self, layer: int, expert: int, slot: Slot) -> None:
        """From the next `publish` on, the GPU computes the expert, in this slot."""
        self._where[layer].slot_of[expert] = slot
        self.tables.to_gpu(layer, expert, slot)
        self._resident[layer, expert] = True

    def _leave(self, layer: int, expert: int) -> Slot:
        """From the next `publish` on, the CPU computes the expert, under its number. Returns its slot."""
        where = self._where[layer]
        self.tables.to_cpu(layer, expert, where.number_of[expert])
        self._resident[layer, expert] = False
        return where.slot_of.pop(expert)

    # ---- slots in memory that comes and goes; RAM must have all experts

    def fetch(self, layer: int, expert: int, slot: Slot) -> Copy:
        """Start copying an expert to a slot, which no step in flight may use; `place` follows. It does not move
        meanwhile."""
        pairs = slot.parts(*self.layers[layer].in_place(self._where[layer].number_of[expert]))
        self._movable[layer, expert] = False
        self.moved.nbytes += sum(to.nbytes for to, _ in pairs)
        return self._copier.start(pairs)

    def place(self, layer: int, expert: int, slot: Slot) -> None:
        """From the next `publish` on, the GPU computes a fetched expert, in this slot, whose memory is lent."""
        self.lent.add(slot.address)
        self._enter(layer, expert, slot)
        self._movable[layer, expert] = True
        self._resized()

    def forget(self, layer: int, expert: int) -> None:
        """A fetched expert is not placed."""
        self._movable[layer, expert] = True

    @property
    def num_movable_in_ram(self) -> int:
        """Number of experts that slots in lent memory could get."""
        return int((~self._resident & self._movable).sum())

    def arrivals(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` experts in RAM, (layer, expert), that should get additional slots."""
        counts = [layer.experts for layer in self.layers]
        return choose_arrivals(self.heat.heat, self._resident, self._movable, counts, most)

    def clear(self, memories: Sequence[torch.Tensor]) -> Copy:
        """Start filling memory that no step uses with zeros."""
        return self._copier.clear(memories)

    def give_up(self, leaving: Collection[int], step: int) -> None:
        """Have these lent slots, by address, not be named from step `step` on, before which this is called: the CPU
        gets their experts. Those of moves under way follow at a later call, once these have ended."""
        self._leaving.update(leaving)
        for layer, where in enumerate(self._where):
            for expert, slot in list(where.slot_of.items()):
                if slot.address in leaving and self._movable[layer, expert]:
                    self._evict(layer, expert, step, spare=False)
        for size, slots in self._spare.items():
            out = [slot for slot in slots if slot.address in leaving]
            self._gone += [slot.address for slot in out]
            self._spare[size] = [slot for slot in slots if slot.address not in leaving]
            for _ in out:
                self._owe(size)
        self._repay(step)
        self._resized()

    def _resized(self) -> None:
        self.heat.resize(self._resident.sum(1).tolist())

    def gone(self) -> list[int]:
        """The slots given up, by address, that no step reads since the last call."""
        gone, self._gone = self._gone, []
        self.lent.difference_update(gone)
        self._leaving.difference_update(gone)
        return gone

    def _repay(self, step: int) -> None:
        """For each spare slot that left, evict the coldest expert of that size from a slot that stays."""
        for size, owed in list(self._owed.items()):
            stays = np.zeros_like(self._resident)
            for layer, where in enumerate(self._where):
                if self._size[layer] == size:
                    stays[layer, [e for e, slot in where.slot_of.items() if slot.address not in self.lent]] = True
            cold = coldest(self.heat.heat, stays & self._movable, owed)
            for layer, expert in cold:
                self._evict(layer, expert, step, spare=True)
            self._owed[size] = owed - len(cold)
            if not self._owed[size]:
                del self._owed[size]
            self._resized()

    def _evict(self, layer: int, expert: int, step: int, *, spare: bool) -> None:
        self.layers[layer].bring_bias(expert, self._where[layer].number_of[expert])
        self._left.append(_Left(step, self._size[layer], self._leave(layer, expert), spare))

    def _unread(self, since: int) -> bool:
        """True once all steps before step `since` have ended: none reads what the tables no longer name from it on."""
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
        """After a move's copy has arrived: update the tables from this step on. True if the move is complete."""
        swap, where = move.swap, self._where[move.swap.layer]
        if move.came is None:
            self._enter(swap.layer, swap.promote, move.slot)
            move.came, move.copy = step, None
            if not self.inclusive:
                return False
        if not self.inclusive:
            where.number_of[swap.evict] = where.number_of.pop(swap.promote)
        self._evict(swap.layer, swap.evict, step, spare=True)
        self._movable[swap.layer, [swap.promote, swap.evict]] = True
        self.moved.experts += 1
        return True


def _empty(layer: LayerMemory) -> Slot:
    device = layer.slots.up.device
    up, down = (
        torch.empty(of.panels, of.panel_bytes, dtype=torch.uint8, device=device)
        for of in (layer.shape.up, layer.shape.down)
    )
    return Slot(up, down)
