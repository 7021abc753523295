"""The pages that requests can get: free ones, those that only the prefix cache holds, and lent ones, which are asked
back. Never: requests, which of them gets pages."""

from __future__ import annotations

from proa.cache.pages import IntegrityError, PageAllocator
from proa.cache.radix import PrefixCache
from proa.engine.scheduling.lending import Lent, NothingLent


class Room:
    def __init__(self, allocator: PageAllocator, cache: PrefixCache | None) -> None:
        self._allocator, self._cache = allocator, cache
        self.lent: Lent = NothingLent()

    @property
    def num_available(self) -> int:
        """Number of pages that `take` can give now."""
        return self._allocator.num_free + (self._cache.num_evictable if self._cache else 0)

    def take(self, num_pages: int) -> list[int]:
        """Allocate pages; cached prefixes are evicted for them if need be."""
        if self._cache and num_pages > self._allocator.num_free:
            self._cache.evict(num_pages - self._allocator.num_free)
        pages = self._allocator.alloc(num_pages)
        if pages is None:
            raise IntegrityError(f"{num_pages} pages were counted as available but {self._allocator.num_free} are free")
        return pages

    def recall(self, num_missing: int) -> bool:
        """Ask for the return of num_missing lent pages, beyond those available. Returns whether that many will come."""
        return num_missing > 0 and self.lent.recall(num_missing)
