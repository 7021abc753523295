"""Copies runs of KV pages between the caches and host memory. Never: which pages, files, requests.

Called from threads other than the engine's. Pages that are read were written by steps that the host has waited for, and
pages that are written are used only by steps launched afterwards. On a GPU: gpu_pages.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from proa.ops.caches import Caches

AT_ONCE = 4  # runs that a thread writes before it waits: of 12 MiB each, 1 ms of PCIe and 0.3 ms of the host
_ALIGNED_BYTES = 64  # parts of a buffer start at multiples
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class RunLayout:
    """The contents of a buffer: for each tensor of the caches, its part of the run's pages, one after another, padded
    with zeros. rows: the tensors as [pages, words]; starts: the byte at which each one's part begins."""

    rows: Sequence[Tensor]
    starts: Sequence[int]
    run_pages: int
    nbytes: int

    @property
    def word(self) -> torch.dtype:
        return self.rows[0].dtype

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Views of a buffer, uint8 [nbytes]: the part of each tensor, [run_pages, words]."""
        parts = []
        for rows, start in zip(self.rows, self.starts, strict=True):
            part = buffer[start : start + self.run_pages * rows[0].nbytes]
            parts.append(part.view(self.word).view(self.run_pages, -1))
        return parts


def layout_of(caches: Caches, run_pages: int) -> RunLayout:
    """Raises ValueError if no cache has pages."""
    tensors = [tensor for layer in caches for cache in layer for tensor in cache.page_tensors]
    if not tensors:
        raise ValueError("the model has no KV pages")
    # Copies move whole rows, whatever their type: the widest one that divides all of them is fastest.
    rows = [tensor.flatten(1).view(torch.uint8) for tensor in tensors]
    word = next(word for word in _WORDS if all(each.shape[1] % word.itemsize == 0 for each in rows))
    sizes = [-(-run_pages * each.shape[1] // _ALIGNED_BYTES) * _ALIGNED_BYTES for each in rows]
    *starts, nbytes = accumulate(sizes, initial=0)
    return RunLayout([each.view(word) for each in rows], starts, run_pages, nbytes)


class Pages(Protocol):
    """Copies between pages and buffers of one layout. One object per thread."""

    def warm_up(self) -> None:
        """Allocate what copies need and load their kernels. No other thread may be writing pages."""

    def read(self, pages: Sequence[int], into: Tensor) -> None:
        """Copy a run of pages, or the beginning of one, to a buffer; returns when they are there."""

    def begin_write(self, source: Tensor, first: int, pages: Sequence[int]) -> None:
        """Copy the pages [first : first + len(pages)] of a buffer to `pages`. Before `finish`, the buffer must not
        change and the pages may not be there."""

    def finish(self) -> None:
        """Wait for the copies that were begun."""


class HostPages:
    """Implements Pages for pages in host memory."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout

    def warm_up(self) -> None:
        pass

    @torch.inference_mode()
    def read(self, pages: Sequence[int], into: Tensor) -> None:
        if len(pages) < self._layout.run_pages:
            into.zero_()
        at = torch.tensor(pages)
        for rows, part in zip(self._layout.rows, self._layout.parts(into), strict=True):
            torch.index_select(rows, 0, at, out=part[: len(at)])

    @torch.inference_mode()
    def begin_write(self, source: Tensor, first: int, pages: Sequence[int]) -> None:
        at = torch.tensor(pages)
        for rows, part in zip(self._layout.rows, self._layout.parts(source), strict=True):
            rows.index_copy_(0, at, part[first : first + len(at)])

    def finish(self) -> None:
        pass


def new_pages(layout: RunLayout) -> Pages:
    """Copies for pages where they are."""
    if layout.rows[0].device.type != "cuda":
        return HostPages(layout)
    module = importlib.import_module("proa.engine.executors.gpu_pages")  # needs Triton, which comes with GPUs
    pages: Pages = module.GpuPages(layout)
    return pages


def new_buffer(layout: RunLayout) -> Tensor:
    """uint8 [layout.nbytes] of zeros in RAM, pinned if the pages are on a GPU."""
    return torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=layout.rows[0].device.type == "cuda")
