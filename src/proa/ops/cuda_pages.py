"""Moves runs of KV pages between the caches of a GPU and a buffer, by a kernel. Never: copy engines, which pages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from proa.ops.triton.pages import copy_pages, page_table


class RunMover:
    """Moves pages of all layers in one launch on the current stream; never synchronises, apart from the constructor.

    A buffer, uint8, holds each tensor's part of the run's pages, one after another.
    """

    def __init__(self, rows: Sequence[Tensor], starts: Sequence[int]) -> None:
        """rows: the tensors as [pages, words], of one dtype; starts: the byte of a buffer at which each one's part
        begins. Raises ValueError for tensors that do not fit."""
        self._word = rows[0].dtype
        self._rows = rows  # the table has their addresses
        self._table = page_table(rows, [start // self._word.itemsize for start in starts])

    def gather(self, at: Tensor, into: Tensor) -> None:
        """Copy the pages `at`, int64 [n], to the first n places of a buffer."""
        copy_pages(self._table, at, into.view(self._word), 0, gathers=True)

    def scatter(self, at: Tensor, source: Tensor, first: int) -> None:
        """Copy the pages [first : first + n] of a buffer to the pages `at`, int64 [n]. The buffer may be pinned host
        memory: then the kernel reads it over PCIe."""
        copy_pages(self._table, at, source.view(self._word), first, gathers=False)
