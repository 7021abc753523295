"""The numbers of each row of a step: its token, its position, the KV slot that it is written to. Never: planning steps,
devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from proa.engine.executors.batch import Span

Ints = NDArray[np.int64]

LONG = 128  # rows that are written by numpy: of 4096 in 0.2 ms instead of 0.7


def ints(tensor: Tensor) -> memoryview[int]:
    """The tensor's memory, int64 [N] or int32 [N], for writing single elements: between steps, with cold CPU caches,
    that takes a fraction of the time of numpy's."""
    return tensor.numpy().data.cast("B").cast("q" if tensor.itemsize == 8 else "i")


class RowNumbers:
    """Writes into buffers that a program or a copy to a device reads: contiguous int64 [rows] each, in RAM."""

    def __init__(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> None:
        self._arrays: tuple[Ints, Ints, Ints] = tokens.numpy(), slots.numpy(), positions.numpy()
        self._tokens, self._slots, self._positions = ints(tokens), ints(slots), ints(positions)

    def fill(self, sequences: Sequence[Span], page_tokens: int) -> int:
        """Write a step; returns its number of rows. Later rows are not changed."""
        tokens, slots, positions, row = self._tokens, self._slots, self._positions, 0
        for s in sequences:
            if len(s.tokens) >= LONG:
                row = self._fill_long(s, row, page_tokens)
                continue
            pages, place = s.pages, s.start
            for token in s.tokens:
                tokens[row], positions[row] = token, place
                slots[row] = pages[place // page_tokens] * page_tokens + place % page_tokens
                row, place = row + 1, place + 1
        return row

    def _fill_long(self, span: Span, row: int, page_tokens: int) -> int:
        """Write the span's rows from `row` on; returns the row after them."""
        tokens, slots, positions = self._arrays
        end, stop = row + len(span.tokens), span.start + len(span.tokens)
        places, first = np.arange(span.start, stop), span.start // page_tokens
        pages = np.array(span.pages[first : -(-stop // page_tokens)])
        tokens[row:end], positions[row:end] = span.tokens, places
        slots[row:end] = pages[places // page_tokens - first] * page_tokens + places % page_tokens
        return end

    def pad(self, row: int) -> None:
        """Make all rows from `row` on padding: slot -1, so their KV is not written."""
        if len(self._slots) - row >= LONG:
            for array, value in zip(self._arrays, (0, -1, 0), strict=True):
                array[row:] = value
            return
        for i in range(row, len(self._slots)):
            self._tokens[i], self._positions[i], self._slots[i] = 0, 0, -1
