"""What a model looks up for each row of a step: its token, its position, the KV slot it is written to. Never: which
rows a step has, devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from proa.engine.executors.batch import Span


def ints(tensor: Tensor) -> memoryview[int]:
    """Its memory, int64 [N] or int32 [N], to be written number by number: between two steps, when all caches are cold,
    that takes a fraction of what numpy does."""
    return tensor.numpy().data.cast("B").cast("q" if tensor.itemsize == 8 else "i")


class RowNumbers:
    """Writes where a program or a copy to a device knows to look: contiguous int64 [rows] each, in RAM."""

    def __init__(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> None:
        self._tokens, self._slots, self._positions = ints(tokens), ints(slots), ints(positions)

    def fill(self, sequences: Sequence[Span], page_tokens: int) -> int:
        """Put a step in; how many rows it has. Rows beyond stay as they were."""
        tokens, slots, positions, row = self._tokens, self._slots, self._positions, 0
        for s in sequences:
            pages, place = s.pages, s.start
            for token in s.tokens:
                tokens[row], positions[row] = token, place
                slots[row] = pages[place // page_tokens] * page_tokens + place % page_tokens
                row, place = row + 1, place + 1
        return row

    def pad(self, row: int) -> None:
        """Rows from this one on are padding: they write nowhere."""
        for i in range(row, len(self._slots)):
            self._tokens[i], self._positions[i], self._slots[i] = 0, 0, -1
