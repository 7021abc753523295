"""The program that the native ops append to, and its buffers. Never: the operations.

While recording, activations are tensors with the largest number of rows of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proa.native.pool import Pool
from proa.native.program import Program
from proa.native.weights import Rows
from proa.ops.packed import Memory


def rows_of(x: Tensor) -> Rows:
    """Rows of a tensor [T, ...], each contiguous; bfloat16, or float32 for outputs and logits. Raises ValueError."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            raise ValueError(f"rows must be contiguous, but the shape is {tuple(x.shape)} with strides {x.stride()}")
        inner *= size
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"rows must be bfloat16 or float32, not {x.dtype}")
    return Rows(x.data_ptr(), x.stride(0), x.dtype is torch.float32)


class Recorder:
    """The program, and the buffers that its operations write.

    Within a layer every output has its own buffer; the next layer reuses the buffers.
    """

    def __init__(self, pool: Pool, memory: Memory, rows: int, sequences: int, pages: int) -> None:
        self.memory = memory
        self.program = Program(pool, rows, sequences, pages)
        self.rows = rows
        self._buffers: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._kept: list[Tensor] = []  # tensors whose addresses are in the program
        self._next = 0
        self._in_block = False

    def new_block(self) -> None:
        self._next, self._in_block = 0, True

    def end_blocks(self, rows: int) -> None:
        """Mark the end of the layers: buffers of later outputs are not reused, and have at most `rows` rows."""
        self._in_block, self.rows = False, rows

    def new(self, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        key = (self._next, width, dtype)
        self._next += 1
        if self._in_block and key in self._buffers:
            return self._buffers[key]
        buffer = self.keep(torch.zeros(self.rows, width, dtype=dtype))
        if self._in_block:
            self._buffers[key] = buffer
        return buffer

    def take(self, table: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Record a lookup of rows of `table` [N, width], of any dtype, copied unchanged. ids: int64. out: memory of the
        caller's, which later blocks do not reuse."""
        out = self.new(table.shape[1], table.dtype) if out is None else out
        pairs = table.shape[1] * table.element_size() // 2  # the program counts in two-byte elements
        rows = Rows(out.data_ptr(), pairs, False)
        self.program.add_embed(ids.data_ptr(), self.keep(table).data_ptr(), len(table), pairs, rows)
        return out

    def keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor
