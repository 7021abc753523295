"""Copies runs of KV pages between a GPU's caches and pinned host memory. Never: which pages, files, requests.

Each thread copies on a stream of its own. A run crosses PCIe in one copy, from or to a buffer in VRAM, and one kernel
moves its pages between that buffer and the caches. Several runs are written without a wait between them: while one
thread's kernel runs, the copy of another thread uses PCIe, and neither needs Python until the last of its runs.

Page numbers come from pinned memory, in a copy that the host does not wait for: one that it waits for would stand
behind the other thread's run, and the link would be idle from that run's end until the host had begun the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa.engine.executors.page_copies import AT_ONCE, RunLayout
from proa.ops.cuda_pages import RunMover


@dataclass(frozen=True)
class _Memory:
    """staged: a run, uint8, and at: page numbers, int64 [AT_ONCE, run_pages], in VRAM; numbers: the same in pinned
    RAM."""

    mover: RunMover
    staged: Tensor
    at: Tensor
    numbers: Tensor


class GpuPages:
    """Implements Pages of page_copies.py. Allocates VRAM with its first copy."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout, self._device = layout, layout.rows[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._made: _Memory | None = None
        self._begun = 0  # runs, each of which uses a row of page numbers

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Copies page 0 to the buffer and back."""
        with torch.cuda.stream(self._stream):
            memory, at = self._memory(), self._numbers([0])
            memory.mover.gather(at, memory.staged)
            memory.mover.scatter(at, memory.staged, 0)
        self.finish()

    @torch.inference_mode()
    def read(self, pages: Sequence[int], into: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            memory, at = self._memory(), self._numbers(pages)
            if len(pages) < self._layout.run_pages:
                memory.staged.zero_()
            memory.mover.gather(at, memory.staged)
            into.copy_(memory.staged, non_blocking=True)
        self.finish()

    @torch.inference_mode()
    def begin_write(self, source: Tensor, first: int, pages: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            memory, at = self._memory(), self._numbers(pages)
            memory.staged.copy_(source, non_blocking=True)
            memory.mover.scatter(at, memory.staged, first)

    def finish(self) -> None:
        self._stream.synchronize()
        self._begun = 0

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        """The pages' numbers in VRAM, int64 [n]."""
        memory = self._memory()
        if self._begun == AT_ONCE:
            self.finish()
        row, count = self._begun, len(pages)
        self._begun += 1
        numbers = memory.numbers[row, :count]
        numbers.copy_(torch.tensor(pages))
        return memory.at[row, :count].copy_(numbers, non_blocking=True)

    def _memory(self) -> _Memory:
        """Must be called on the stream, so that torch reuses none of it for another one."""
        if self._made is None:
            layout, device = self._layout, self._device
            staged = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
            at = torch.zeros(AT_ONCE, layout.run_pages, dtype=torch.int64, device=device)
            numbers = torch.zeros(at.shape, dtype=torch.int64, pin_memory=True)
            self._made = _Memory(RunMover(layout.rows, layout.starts), staged, at, numbers)
        return self._made
