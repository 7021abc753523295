"""Copies runs of KV pages between the caches and host memory. Never: which pages, files, requests.

Called from threads other than the engine's. On a GPU each copies on a stream of its own: pages that are read were
written by steps that the host has waited for, and pages that are written are used only by steps launched afterwards. A
run crosses PCIe in one copy, from or to a buffer in VRAM, and its launches, one for each tensor, are a graph: launched
one by one they had a tenth of PCIe's rate, and made the engine's thread wait for Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proa.ops.caches import Caches

_ALIGNED_BYTES = 64  # parts of a buffer start at multiples


def _at_once(launch: Callable[[], None]) -> None:
    launch()


class Repeated:
    """Launches on the current stream that are the same each time, addresses included: the first time one by one, which
    loads their kernels, then as a graph."""

    def __init__(self) -> None:
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, launch: Callable[[], None]) -> None:
        self._runs += 1
        if self._runs == 1:
            launch()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.current_stream().synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
            self._graph = graph
        self._graph.replay()


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
        self._staged: Tensor | None = None  # uint8 [run_bytes] in VRAM, once it is needed
        self._at: Tensor | None = None  # int64 [run_pages] in VRAM
        self._gather = Repeated() if on_gpu else _at_once
        self._scatter = Repeated() if on_gpu else _at_once

    def new_buffer(self) -> Tensor:
        """uint8 [run_bytes], pinned if the pages are on a GPU."""
        return torch.zeros(self.run_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    @torch.inference_mode()
    def read(self, pages: Sequence[int], into: Tensor) -> None:
        """Copy a run of pages, or the beginning of one, to `into`, a buffer as new_buffer makes them; returns when they
        are there."""
        with torch.cuda.stream(self._stream):
            at, run = self._numbers(pages), self._near(into)
            if len(pages) == self._run_pages:
                self._gather(lambda: self._read_rows(at, run))
            else:
                run.zero_()
                self._read_rows(at, run)
            if run is not into:
                into.copy_(run, non_blocking=True)
        self._finish()

    @torch.inference_mode()
    def write(self, source: Tensor, first: int, pages: Sequence[int]) -> None:
        """Copy the pages [first : first + len(pages)] of a run to `pages`; returns when they are there."""
        with torch.cuda.stream(self._stream):
            at, run = self._numbers(pages), self._near(source)
            if run is not source:
                run.copy_(source, non_blocking=True)
            if len(pages) == self._run_pages:
                self._scatter(lambda: self._write_rows(at, run, 0))
            else:
                self._write_rows(at, run, first)
        self._finish()

    def _read_rows(self, at: Tensor, run: Tensor) -> None:
        for rows, part in zip(self._rows, self._parts(run), strict=True):
            torch.index_select(rows, 0, at, out=part[: len(at)])

    def _write_rows(self, at: Tensor, run: Tensor, first: int) -> None:
        for rows, part in zip(self._rows, self._parts(run), strict=True):
            rows.index_copy_(0, at, part[first : first + len(at)])

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        """The pages' numbers, int64, where the pages are; on a GPU always in the same memory."""
        if self._stream is None:
            return torch.tensor(pages)
        if self._at is None:
            self._at = torch.zeros(self._run_pages, dtype=torch.int64, device=self.device)
        at = self._at[: len(pages)]
        return at.copy_(torch.tensor(pages))

    def _near(self, buffer: Tensor) -> Tensor:
        """A buffer where the pages are: this one, or the one in VRAM."""
        if self._stream is None:
            return buffer
        if self._staged is None:
            self._staged = torch.zeros(self.run_bytes, dtype=torch.uint8, device=self.device)
        return self._staged

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
