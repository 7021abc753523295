"""The page table of a step's sequences, as kernels read it. Never: allocating pages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from proa.engine.executors.row_numbers import ints


class PageTable:
    """int32 [sequences, most pages] in RAM, written in place at an address that kernels keep."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = [ints(row) for row in rows]
        self._pages: list[Sequence[int]] = [()] * len(rows)  # the list written to each row,
        self._counts = [0] * len(rows)  # and how many of its pages

    def set(self, i: int, pages: Sequence[int]) -> None:
        """Write a sequence's pages to row i. The list is kept by reference and only its new entries are written the
        next time: it may grow, but its existing entries must not change."""
        if pages is not self._pages[i]:
            self._pages[i], self._counts[i] = pages, 0
        for page in range(self._counts[i], len(pages)):
            self._rows[i][page] = pages[page]
        self._counts[i] = len(pages)
