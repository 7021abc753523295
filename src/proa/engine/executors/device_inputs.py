"""A step's inputs laid out for a GPU: one block, copied at once. Never: launching kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proa.engine.executors.batch import Span
from proa.engine.executors.page_table import PageTable
from proa.engine.executors.row_numbers import RowNumbers, ints
from proa.ops.host_block import HostBlock
from proa.ops.sizes import input_counts, input_starts
from proa.ops.table import DeviceBatch


class DeviceInputs:
    """Buffers for `rows` rows of `sequences` sequences, on the host and on the device, at fixed addresses.

    Rows and sequences beyond a step's own are padding: slot -1, length 0, token 0. rows_each: see DeviceBatch.
    """

    def __init__(self, rows: int, sequences: int, most_pages: int, *, rows_each: int, device: torch.device) -> None:
        self.rows, self._sequences = rows, sequences
        counts, starts = input_counts(rows, sequences, most_pages), input_starts(rows, sequences, most_pages)
        nbytes = starts[-1]
        self._block = HostBlock((nbytes // 4,), torch.int32, device)
        self._device = torch.zeros(nbytes // 4, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        mine, theirs = (_views(of.view(torch.uint8), counts, starts) for of in (self._block.host, self._device))
        self._rows = RowNumbers(*mine[:3])
        self._q_starts, self._kv_lens, self._states = map(ints, mine[3:6])
        self._pages = PageTable(mine[6].view(sequences, most_pages))
        self.tokens, self.slots, self.positions = theirs[:3]
        self.batch = DeviceBatch(rows_each, theirs[3], theirs[4], theirs[6].view(sequences, most_pages), theirs[5])

    def fill(self, sequences: Sequence[Span], page_tokens: int) -> int:
        """Write a step to the host buffer; returns its number of rows. Waits for the last `copy` to end."""
        if self._copied is not None:
            self._copied.synchronize()
        row = 0
        for i, s in enumerate(sequences):
            self._pages.set(i, s.pages)
            self._q_starts[i], self._kv_lens[i], self._states[i] = row, s.start + len(s.tokens), s.state
            row += len(s.tokens)
        for i in range(len(sequences), self._sequences):
            self._q_starts[i], self._kv_lens[i] = row, 0
        self._q_starts[self._sequences] = row
        self._rows.fill(sequences, page_tokens)
        self._rows.pad(row)
        return row

    def copy(self) -> None:
        """Start the copy to the device on the current stream."""
        self._block.copy_to(self._device)
        if self._copied is not None:
            self._copied.record()

    def take_tokens(self, best: Tensor, count: int) -> None:
        """Copy results of the sampler to the tokens of a decode step, on the device. A row without a result, non-finite
        or left to the CPU, gets token 0. best: int32 [>= count]."""
        self.tokens[:count].copy_(best[:count]).clamp_(min=0)


def _views(block: Tensor, counts: Sequence[int], starts: Sequence[int]) -> list[Tensor]:
    dtypes = (torch.int64,) * 3 + (torch.int32,) * 4
    return [
        block[at : at + count * dtype.itemsize].view(dtype)
        for at, count, dtype in zip(starts, counts, dtypes, strict=False)
    ]
