"""Allocation of KV pages: a free list and reference counts. Never: tensors, token ids, requests, policy."""

from __future__ import annotations

from collections.abc import Iterable


class IntegrityError(RuntimeError):
    """A bookkeeping invariant of the cache or the scheduler is broken: always a bug in Proa."""


class PageAllocator:
    """Allocates page numbers 0..num_pages-1. A page may have several holders (requests, the prefix tree) and
    returns to the free list with its last reference. The most recently freed page is allocated first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def alloc(self, num_pages: int) -> list[int] | None:
        """Allocate `num_pages` pages with one reference each; None, and nothing allocated, if fewer are free."""
        if num_pages > len(self._free):
            return None
        cut = len(self._free) - num_pages
        pages = self._free[cut:][::-1]
        del self._free[cut:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page. Raises IntegrityError for a free page."""
        for page in pages:
            if self._references[page] < 1:
                raise IntegrityError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page. Raises IntegrityError for a free page."""
        for page in pages:
            count = self._references[page] - 1
            if count < 0:
                raise IntegrityError(f"page {page} is free and cannot be released")
            self._references[page] = count
            if count == 0:
                self._free.append(page)

    def check(self) -> None:
        """Raise IntegrityError unless the free list and the reference counts agree."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"the free list holds {len(self._free)} entries but {len(free)} pages")
        unheld = {page for page, count in enumerate(self._references) if count == 0}
        if free != unheld:
            raise IntegrityError(
                f"free pages with references: {sorted(free - unheld)}; pages without references that are not free: "
                f"{sorted(unheld - free)}"
            )
        negative = [page for page, count in enumerate(self._references) if count < 0]
        if negative:
            raise IntegrityError(f"pages with negative reference counts: {negative}")
