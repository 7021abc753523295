"""Copies of recurrent states: which slot holds which copy, and which copy is evicted next. Never: tensors, requests,
when to make a copy.

KV pages hold every past token of a sequence; a recurrent state holds only its current position. A prompt can therefore
reuse a prefix only if a copy of all layers' states at exactly its end was kept: docs/decisions/032.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Set

from proa.cache.pages import IntegrityError


class StateCopies:
    """Slots `first_slot` to first_slot + num_slots - 1. A copy belongs to a node of the prefix tree and is dropped with
    it.

    Eviction order: first copies that only the sequence that made them has used and that it has replaced by a later one,
    then the least recently used. A locked copy is not evicted.
    """

    def __init__(self, first_slot: int, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, but it is {num_slots}")
        self.num_slots = num_slots
        self._slots = range(first_slot, first_slot + num_slots)
        self._free = list(reversed(self._slots))
        self._held: OrderedDict[Hashable, int] = OrderedDict()  # node -> slot, in the order of eviction
        self._used: set[Hashable] = set()  # nodes whose copy a request has continued from
        self._locked: set[Hashable] = set()  # nodes whose copy is being read by other threads

    def __contains__(self, node: object) -> bool:
        return node in self._held

    @property
    def nodes(self) -> Set[Hashable]:
        """The nodes that have a copy."""
        return self._held.keys()

    def take(self, avoid: Set[int] = frozenset()) -> int | None:
        """Reserve a slot to copy into, none of `avoid`: a free one, else that of the evicted copy; None if there is
        none."""
        if all(slot in avoid for slot in self._free):
            node = next((n for n, slot in self._held.items() if n not in self._locked and slot not in avoid), None)
            if node is None:
                return None
            self.drop(node)
        at = next(at for at in reversed(range(len(self._free))) if self._free[at] not in avoid)
        return self._free.pop(at)

    def give_back(self, slot: int) -> None:
        """Return a reserved slot unused."""
        self._free.append(slot)

    def keep(self, node: Hashable, slot: int) -> None:
        """Register the copy in `slot`, which was reserved, as the states at the end of `node`. If the node has a copy
        already, that one is kept and the slot is returned."""
        if node in self._held:
            self._held.move_to_end(node)
            self.give_back(slot)
        else:
            self._held[node] = slot

    def use(self, node: Hashable) -> int:
        """The slot of the node's copy, for a request that continues from it; makes it the most recently used."""
        self._held.move_to_end(node)
        self._used.add(node)
        return self._held[node]

    def slot(self, node: Hashable) -> int | None:
        """The slot of the node's copy, if it has one; does not count as a use."""
        return self._held.get(node)

    def lock(self, node: Hashable) -> None:
        """Protect the node's copy from eviction until `unlock`. The node itself must be locked in the tree."""
        self._locked.add(node)

    def unlock(self, node: Hashable) -> None:
        """Undo `lock`."""
        self._locked.remove(node)

    def pass_by(self, node: Hashable) -> None:
        """Evict this copy next, because its sequence has a later one; unless a request has continued from it."""
        if node in self._held and node not in self._used:
            self._held.move_to_end(node, last=False)

    def drop(self, node: Hashable) -> None:
        """Drop the node's copy, if it has one, which must not be locked."""
        slot = self._held.pop(node, None)
        self._used.discard(node)
        if slot is not None:
            self._free.append(slot)

    def check(self, taken: Collection[int]) -> None:
        """Raise IntegrityError unless every slot is exactly one of free, held by a node, or in `taken` (reserved)."""
        known = sorted([*self._free, *self._held.values(), *taken])
        if known != list(self._slots):
            raise IntegrityError(f"the slots of copied states are {known}, but should be {list(self._slots)}")
        if not self._used <= self._held.keys():
            raise IntegrityError("a node without a copy of states is marked as used")
        if not self._locked <= self._held.keys():
            raise IntegrityError("a locked copy of states was dropped")
