"""Copies runs of KV pages between the caches and host memory. Never: which pages, files, requests.

Called from threads other than the engine's. On a GPU each copies on a stream of its own: pages that are read were
written by steps that the host has waited for, and pages that are written are used only by steps launched afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proa.ops.caches import Caches

_ALIGNED_BYTES = 64  # parts of a buffer start at multiples


class PageCopies:
    """Copies between the pages of all layers and a buffer in host memory. A buffer holds a run: for each tensor of the
    caches, its part of the pages, one after another, padded with zeros. One object per thread."""

    def __init__(self, caches: Caches, run_pages: int) -> None:
        """Raises ValueError if no cache has pages."""
        tensors = [tensor for layer in caches for cache in layer for tensor in cache.page_tensors]
        if not tensors:
            raise ValueError("the model has no KV pages")
        # Indexing moves whole rows, whatever their type: the widest one that divides them is fastest.
        self._rows = [_as_rows(tensor) for tensor in tensors]
        self._run_pages = run_pages
        device = tensors[0].device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.device = device
        self.run_bytes = sum(map(self._part_bytes, self._rows))

    def new_buffer(self) -> Tensor:
        """uint8 [run_bytes], pinned if the pages are on a GPU."""
        return torch.zeros(self.run_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    @torch.inference_mode()
    def read(self, pages: Sequence[int], into: Tensor) -> None:
        """Copy a run of pages to `into`, a buffer as new_buffer makes them; returns when they are there."""
        with torch.cuda.stream(self._stream):
            at = torch.tensor(pages, device=self.device)
            for rows, part in zip(self._rows, self._parts(into), strict=True):
                if self._stream is None:
                    torch.index_select(rows, 0, at, out=part)
                else:
                    part.copy_(rows.index_select(0, at), non_blocking=True)
        self._finish()

    @torch.inference_mode()
    def write(self, source: Tensor, first: int, pages: Sequence[int]) -> None:
        """Copy the pages [first : first + len(pages)] of a run to `pages`; returns when they are there."""
        with torch.cuda.stream(self._stream):
            at = torch.tensor(pages, device=self.device)
            for rows, part in zip(self._rows, self._parts(source), strict=True):
                wanted = part[first : first + len(pages)]
                rows.index_copy_(0, at, wanted.to(self.device, non_blocking=True))
        self._finish()

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        """Views of the buffer: the part of each tensor, [run_pages, row]."""
        parts, at = [], 0
        for rows in self._rows:
            part = buffer[at : at + self._run_pages * rows[0].nbytes]
            parts.append(part.view(rows.dtype).view(self._run_pages, -1))
            at += self._part_bytes(rows)
        return parts

    def _part_bytes(self, rows: Tensor) -> int:
        return -(-self._run_pages * rows[0].nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _as_rows(tensor: Tensor) -> Tensor:
    """[pages, ...] -> [pages, N] of integers, as wide as its rows allow; the same memory."""
    rows = tensor.flatten(1).view(torch.uint8)
    wide = next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if rows.shape[1] % t.itemsize == 0)
    return rows.view(wide)
