"""The pages of a step's sequences as one table that kernels read. Never: which page is whose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class PageTable:
    """int32 [sequences, most pages], written in place: kernels know its address."""

    def __init__(self, rows: NDArray[np.int32]) -> None:
        self._rows = rows
        self._pages: list[Sequence[int]] = [()] * len(rows)  # what stands there

    def set(self, i: int, pages: Sequence[int]) -> None:
        """A sequence mostly has the pages it had, or one more."""
        before = self._pages[i]
        if before == pages:
            return
        kept = len(before) if before == pages[: len(before)] else 0
        self._rows[i, kept : len(pages)] = pages[kept:]
        self._pages[i] = list(pages)
