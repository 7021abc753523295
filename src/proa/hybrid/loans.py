"""Holds experts in idle KV pages: lots of pages are lent, filled with experts, and taken back when sequences need them.
Belongs here: the order of copies, table updates and reuse, by which no launch reads half a copy or a page that is
written. Never: which pages (engine/scheduling/lending.py), which experts (machine/cost/heat.py).

RAM has a copy of every expert. A lot is memory of KV pages, cut into rooms (cache/lots.py). A room is a slot like any
other while it is lent: tables hold addresses, so steps and graphs do not change, and experts in it swap and are
promoted as elsewhere (moves.py, promotions.py).

- **Lending.** The pages are free. Launches in flight may still use them, so a room is written only once all
  launches before the loan have ended: the rule for slots that tables no longer name. An expert is copied there beside
  the steps, and tables name it from the next launch on, once it has arrived. Copies are on the stream of other moves.
- **Taking back.** The tables change for the next launch: the CPU gets the experts, and nothing is copied. Lots are
  taken back one after another, because the host needs some 10 us for each expert's row of the tables (an estimate), and
  a decode step waits for it. When all launches before that have ended, none reads the rooms. They are filled with zeros
  then, since attention multiplies rows that it masks by 0, and bytes of experts may be NaN. The pages are given back
  only when that is done, so a write to them comes later, on any stream. A copy or a move to or from a room that is
  under way ends first. A swap may have made a room a spare slot; the coldest expert's slot elsewhere replaces it.
- **During a pass** (streaming.py) tables stay as they are, those of moves under way too: it has a copy of them, and its
  launches may be on a stream of their own. So nothing is lent, placed or taken back before its end, which a counted
  launch follows. Promotions go on: they overwrite a room on the stream of the steps, as they do any slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from proa.hybrid.copies import Copy
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.moves import Moves
from proa.hybrid.slots import Slot
from proa.ops.sizes import aligned


@dataclass
class _Lot:
    """A lent lot. since: the first launch that does not use its pages as KV. empty: rooms without an expert. used:
    addresses of the others that moves know as slots."""

    since: int
    empty: list[Tensor]
    used: set[int] = field(default_factory=set)
    closing: bool = False
    leaving: bool = False  # its experts leave it since an update of the tables
    clearing: Copy | None = None


@dataclass(frozen=True, eq=False)
class _Fetch:
    layer: int
    expert: int
    slot: Slot
    lot: int
    copy: Copy


class Loans:
    """rooms: of each lot, uint8. most: copies at once. All calls come from the thread that launches."""

    def __init__(self, moves: Moves, rooms: Sequence[Sequence[Tensor]], most: int) -> None:
        if not moves.inclusive:
            raise ValueError("KV pages can be lent only where RAM has a copy of every expert")
        self._moves, self._rooms, self._most = moves, rooms, most
        self._lots: dict[int, _Lot] = {}
        self._fetches: list[_Fetch] = []
        self._returned: list[int] = []
        self._ended = 0

    @property
    def num_slots(self) -> int:
        """Rooms that have an expert, or are a spare slot."""
        return sum(len(lot.used) for lot in self._lots.values())

    @property
    def nbytes(self) -> int:
        """Bytes of lent rooms."""
        return sum(room.nbytes for lot in self._lots for room in self._rooms[lot])

    @property
    def busy(self) -> bool:
        """Whether copies are under way or due, so that `before` and `meanwhile` have something to do."""
        lots = self._lots.values()
        waits = self._moves.num_movable_in_ram > 0
        return bool(self._fetches) or any(lot.closing or (lot.empty and waits) for lot in lots)

    @property
    def wanted(self) -> int:
        """Rooms that experts in RAM could fill, beyond those that are lent."""
        empty = sum(len(lot.empty) for lot in self._lots.values() if not lot.closing)
        return max(0, self._moves.num_movable_in_ram - empty)

    def lend(self, lot: int, launched: int) -> None:
        """Pages of this lot are free, and stay so until it returns. launched: launches so far, which may use them."""
        self._lots[lot] = _Lot(launched + 1, list(self._rooms[lot]))

    def take_back(self, lot: int) -> None:
        self._lots[lot].closing = True

    def returned(self) -> list[int]:
        """The lots whose pages may be used again, since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def before(self, step: int, ended: int) -> None:
        """Update tables, before launch number `step`, behind Moves.before. ended: launches that have ended, in order.
        Not during a pass."""
        self._ended = ended
        arrived = [fetch for fetch in self._fetches if fetch.copy.done()]
        self._fetches = [fetch for fetch in self._fetches if fetch not in arrived]
        for fetch in arrived:
            self._arrive(fetch)
        closing = [lot for lot in self._lots.values() if lot.closing]
        if following := next((lot for lot in closing if lot.used and not lot.leaving), None):
            following.leaving = True
        if leaving := set[int]().union(*(lot.used for lot in closing if lot.leaving)):
            self._moves.give_up(leaving, step)
        if gone := self._moves.gone():
            for lot in closing:
                lot.used.difference_update(gone)
        self._finish()

    def _arrive(self, fetch: _Fetch) -> None:
        lot = self._lots[fetch.lot]
        if lot.closing:
            self._moves.forget(fetch.layer, fetch.expert)
        else:
            lot.used.add(fetch.slot.address)
            self._moves.place(fetch.layer, fetch.expert, fetch.slot)

    def _finish(self) -> None:
        fetching = {fetch.lot for fetch in self._fetches}
        for number, lot in list(self._lots.items()):
            if not lot.closing or lot.used or number in fetching or not self._is_unused(lot):
                continue
            if lot.clearing is None:
                lot.clearing = self._moves.clear(self._rooms[number])
            if lot.clearing.done():
                del self._lots[number]
                self._returned.append(number)

    def meanwhile(self) -> None:
        """Start copies, beside launches in flight. Not during a pass."""
        room = self._most - len(self._fetches)
        ready = [(number, lot) for number, lot in self._lots.items() if lot.empty and not lot.closing]
        ready = [(number, lot) for number, lot in ready if self._is_unused(lot)]
        if room <= 0 or not ready:
            return
        rooms = [(number, lot) for number, lot in ready for _ in lot.empty][:room]
        for (number, lot), (layer, expert) in zip(rooms, self._moves.arrivals(len(rooms)), strict=False):
            slot = slot_in(lot.empty.pop(), self._moves.layers[layer])
            self._fetches.append(_Fetch(layer, expert, slot, number, self._moves.fetch(layer, expert, slot)))

    def _is_unused(self, lot: _Lot) -> bool:
        """Whether no launch in flight uses the lot's pages as KV."""
        return self._ended >= lot.since - 1


def room_bytes(layers: Sequence[LayerMemory]) -> int:
    """Bytes of a room that holds any expert of these layers."""
    return max(_down_at(layer) + layer.shape.down.matrix_bytes for layer in layers)


def slot_in(room: Tensor, layer: LayerMemory) -> Slot:
    """A slot of a layer's experts in a room."""
    up, down, at = layer.shape.up, layer.shape.down, _down_at(layer)
    return Slot(
        room[: up.matrix_bytes].view(up.panels, up.panel_bytes),
        room[at : at + down.matrix_bytes].view(down.panels, down.panel_bytes),
    )


def _down_at(layer: LayerMemory) -> int:
    return aligned(layer.shape.up.matrix_bytes)
