"""Lends idle KV pages to experts, and asks them back when requests need them. Belongs here: when lots are lent and
asked back, and which cached prefixes are evicted for it. Never: tensors, experts, where lots lie (cache/lots.py).

A lot is lent once all of its pages have been free for IDLE_S, unless a request waits. A request that lacks only pages
for its admission waits until lent ones have come back; no other request is preempted for it. A few pages for each
running request are asked back before they are needed, so that decode does not wait.

Pages of cached prefixes are not lent. If two lots or more could be lent, prefixes unused for KEPT_S are evicted, and
after STORED_S already if a tier behind the prefix cache holds copies, from which they are restored.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from proa.cache.lots import Demand, Lots, lots_due, lots_to_lend
from proa.cache.pages import PageAllocator
from proa.cache.radix import PrefixCache

IDLE_S = 1.0  # pages that have been free for this long are lent
LOOK_S = 0.25  # from one search for such pages to the next
STORED_S, KEPT_S = 4.0, 600.0  # how long an unused prefix stays cached: with copies in a lower tier, without
RESERVE_PAGES = 4  # for each running request
HEADROOM_TOKENS, HEADROOM_SHARE = 4096, 8  # stay free for the next request, at most an 8th of the pool
EVICTED_AT_ONCE = 1024  # pages: some 0.4 ms


class Owner(Protocol):
    """Holds experts in lent lots (hybrid/model.py)."""

    @property
    def filling(self) -> bool:
        """Whether `returned` should be called soon."""

    @property
    def rooms_wanted(self) -> int:
        """Rooms that experts could fill, beyond those that are lent."""

    def lend(self, lot: int) -> None: ...

    def take_back(self, lot: int) -> None: ...

    def returned(self) -> Sequence[int]:
        """Continue taking lots back, between two steps. Returns the lots whose pages have become free since the last
        call."""


class Lent(Protocol):
    """Lent pages, as the scheduler sees them."""

    @property
    def busy(self) -> bool:
        """Whether `collect` should be called soon."""

    @property
    def due_later(self) -> bool:
        """Whether `collect` should be called every second or so, also while there is no work."""

    def collect(self, num_running: int, num_waiting: int) -> None:
        """Take pages that came back, lend others. Called before each step, and regularly while there is none."""

    def recall(self, num_pages: int) -> bool:
        """Ask for the return of num_pages pages, which a request lacks. Returns whether all of them will come."""


class NothingLent:
    """No pages are lent."""

    busy = due_later = False

    def collect(self, num_running: int, num_waiting: int) -> None:
        pass

    def recall(self, num_pages: int) -> bool:
        return False


class LentPages:
    def __init__(
        self, lots: Lots, owner: Owner, allocator: PageAllocator, cache: PrefixCache | None, page_tokens: int,
        *, stored: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """stored: whether a tier behind the prefix cache holds copies of what can be evicted."""
        self._lots, self._owner, self._allocator, self._cache = lots, owner, allocator, cache
        self._stored, self._clock = stored, clock
        self._headroom = min(HEADROOM_TOKENS // page_tokens, allocator.num_pages // HEADROOM_SHARE)
        self._lent: set[int] = set()
        self._coming: set[int] = set()  # of these, those that were asked back
        self._free_since: dict[int, float] = {}  # of lots all of whose pages are free
        self._uses = deque[tuple[float, int]]()  # times, and the prefix cache's clock then
        self._reserve = 0
        self._next_look_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._coming) or (bool(self._lent) and self._owner.filling)

    @property
    def due_later(self) -> bool:
        return len(self._lent) < self._lots.count and self._owner.rooms_wanted > 0

    def collect(self, num_running: int, num_waiting: int) -> None:
        if self.busy:
            for lot in self._owner.returned():
                self._allocator.take_back(self._lots.pages(lot))
                self._lent.remove(lot)
                self._coming.remove(lot)
        self._reserve = RESERVE_PAGES * max(1, num_running)
        self._ask(lots_due(0, self._demand, self._lots.num_pages))
        now = self._clock()
        if now >= self._next_look_s:
            self._next_look_s = now + LOOK_S
            self._look(now, may_lend=not num_waiting)

    def recall(self, num_pages: int) -> bool:
        self._ask(lots_due(num_pages + self._reserve, self._demand, self._lots.num_pages))
        return num_pages <= self._demand.coming

    @property
    def _demand(self) -> Demand:
        evictable = self._cache.num_evictable if self._cache else 0
        return Demand(self._allocator.num_free, evictable, len(self._coming) * self._lots.num_pages, self._reserve)

    def _ask(self, count: int) -> None:
        """Ask lots back, those with the lowest pages first."""
        for lot in sorted(self._lent - self._coming, reverse=True)[:count]:
            self._coming.add(lot)
            self._owner.take_back(lot)

    def _look(self, now: float, *, may_lend: bool) -> None:
        if may_lend and self._cache is not None and self._owner.rooms_wanted:
            self._evict_unused(self._cache, now)
        free = {
            lot for lot in range(self._lots.count)
            if lot not in self._lent and self._allocator.all_free(self._lots.pages(lot))
        }  # fmt: skip
        self._free_since = {lot: self._free_since.get(lot, now) for lot in free}
        if not may_lend:
            return
        idle = sorted(lot for lot, since in self._free_since.items() if now - since >= IDLE_S)
        count = min(
            lots_to_lend(self._demand, self._headroom, self._lots.num_pages),
            -(-self._owner.rooms_wanted // self._lots.rooms_each),
        )
        for lot in idle[:count]:
            self._allocator.lend(self._lots.pages(lot))
            self._lent.add(lot)
            self._owner.lend(lot)
            del self._free_since[lot]

    def _evict_unused(self, cache: PrefixCache, now: float) -> None:
        """Evict prefixes that have long been unused, if that frees two lots or more to lend."""
        self._uses.append((now, cache.uses))
        since = now - (STORED_S if self._stored() else KEPT_S)
        while len(self._uses) > 1 and self._uses[1][0] <= since:
            self._uses.popleft()
        time_s, uses = self._uses[0]
        if time_s <= since and cache.num_evictable >= 2 * self._lots.num_pages:
            cache.evict(EVICTED_AT_ONCE, uses)
