"""Allocation of KV pages: a free list and reference counts. Never: tensors, token ids, requests, policy."""

from __future__ import annotations

from collections.abc import Iterable


class IntegrityError(RuntimeError):
    """A bookkeeping invariant of the cache or the scheduler is broken: always a bug in Proa."""


_LENT = -(1 << 30)  # in place of a reference count


class PageAllocator:
    """Allocates page numbers 0..num_pages-1. A page may have several holders (requests, the prefix tree) and
    returns to the free list with its last reference. The most recently freed page is allocated first, or the lowest
    number, so that the highest ones stay free for long: these can be lent (cache/lots.py)."""

    def __init__(self, num_pages: int, *, lowest_first: bool = False) -> None:
        self.num_pages, self._lowest_first = num_pages, lowest_first
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._sorted = True  # the free list is in descending order
        self.num_lent = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return max(0, self._references[page])

    def all_free(self, pages: range) -> bool:
        return not any(self._references[pages.start : pages.stop])

    def lend(self, pages: range) -> None:
        """Take free pages out of the free list, until `take_back`. Raises IntegrityError unless all are free."""
        if not self.all_free(pages):
            raise IntegrityError(f"of pages {pages.start} to {pages.stop - 1}, which are to be lent, some are in use")
        self._references[pages.start : pages.stop] = [_LENT] * len(pages)
        self._free = [page for page in self._free if page not in pages]
        self.num_lent += len(pages)

    def take_back(self, pages: range) -> None:
        """Return lent pages to the free list. Raises IntegrityError unless all are lent."""
        if any(count != _LENT for count in self._references[pages.start : pages.stop]):
            raise IntegrityError(f"of pages {pages.start} to {pages.stop - 1}, which are taken back, some are not lent")
        self._references[pages.start : pages.stop] = [0] * len(pages)
        self._free += reversed(pages)
        self._sorted = False
        self.num_lent -= len(pages)

    def alloc(self, num_pages: int) -> list[int] | None:
        """Allocate `num_pages` pages with one reference each; None, and nothing allocated, if fewer are free."""
        if num_pages > len(self._free):
            return None
        if self._lowest_first and not self._sorted:
            self._free.sort(reverse=True)
            self._sorted = True
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
                self._sorted = False

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
        lent = sum(count == _LENT for count in self._references)
        if lent != self.num_lent:
            raise IntegrityError(f"{lent} pages are lent but the counter is {self.num_lent}")
        negative = [page for page, count in enumerate(self._references) if count < 0 and count != _LENT]
        if negative:
            raise IntegrityError(f"pages with negative reference counts: {negative}")
