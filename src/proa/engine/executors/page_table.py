"""The pages of a step's sequences as one table that kernels read. Never: which page is whose."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from proa.engine.executors.row_numbers import ints


class PageTable:
    """int32 [sequences, most pages] in RAM, written in place: kernels know its address."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = [ints(row) for row in rows]
        self._pages: list[Sequence[int]] = [()] * len(rows)  # whose beginning stands there,
        self._counts = [0] * len(rows)  # so many of them

    def set(self, i: int, pages: Sequence[int]) -> None:
        """The list itself is remembered: it may grow, but what is in it must not change."""
        if pages is not self._pages[i]:
            self._pages[i], self._counts[i] = pages, 0
        for page in range(self._counts[i], len(pages)):
            self._rows[i][page] = pages[page]
        self._counts[i] = len(pages)
