"""Copies of recurrent states: which slot holds which, and which of them goes first. Never: tensors, requests, when one
is taken.

A page of KV says what its tokens were; a state only where a sequence is now. So a prompt can go on from a prefix only
where a copy of all layers' states behind exactly that prefix was kept: docs/decisions/032.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Set

from proa.cache.pages import IntegrityError


class StateCopies:
    """`num_slots` slots from `first_slot` on. A copy belongs to a node of the prefix tree, and goes with it.

    The least recently used copy goes first; before it those that their own sequence has passed and nobody else went on
    from.
    """

    def __init__(self, first_slot: int, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError("there must be room for a copy")
        self.num_slots = num_slots
        self._slots = range(first_slot, first_slot + num_slots)
        self._free = list(reversed(self._slots))
        self._held: OrderedDict[Hashable, int] = OrderedDict()  # node -> slot; the first one goes first
        self._used: set[Hashable] = set()  # nodes from which somebody went on

    def __contains__(self, node: object) -> bool:
        return node in self._held

    @property
    def nodes(self) -> Set[Hashable]:
        """Those that have a copy."""
        return self._held.keys()

    def take(self) -> int | None:
        """A slot to copy into: a free one, else that of the copy that goes first; None if all are taken already."""
        if not self._free and self._held:
            self.drop(next(iter(self._held)))
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """A slot that was taken, and holds nothing that anybody wants."""
        self._free.append(slot)

    def keep(self, node: Hashable, slot: int) -> None:
        """What was copied into `slot`, which was taken, are the states behind `node`. If there is such a copy already,
        that one stays."""
        if node in self._held:
            self._held.move_to_end(node)
            self.give_back(slot)
        else:
            self._held[node] = slot

    def use(self, node: Hashable) -> int:
        """The slot to go on from."""
        self._held.move_to_end(node)
        self._used.add(node)
        return self._held[node]

    def pass_by(self, node: Hashable) -> None:
        """The sequence of this copy has a later one."""
        if node in self._held and node not in self._used:
            self._held.move_to_end(node, last=False)

    def drop(self, node: Hashable) -> None:
        """The node's copy, if it has one, is gone."""
        slot = self._held.pop(node, None)
        self._used.discard(node)
        if slot is not None:
            self._free.append(slot)

    def check(self, taken: Collection[int]) -> None:
        """Raise IntegrityError unless every slot is free, held by a node, or among those `taken`: one of these."""
        known = sorted([*self._free, *self._held.values(), *taken])
        if known != list(self._slots):
            raise IntegrityError(f"slots of copied states are {known}, not {self._slots}")
        if not self._used <= self._held.keys():
            raise IntegrityError("a copy of states that is gone counts as used")
