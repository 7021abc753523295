"""Weights on their way to a GPU: workers fill pinned memory, from where they are copied. Never: which weights go there.

A sink hands out jobs that fill its part of the staging; after each batch of jobs the loader calls `flush`. What does
not fit comes in rows that are written one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proa.native.fill import Fill, StoredRows, fill
from proa.native.formats import Form, Format, Stored, layout
from proa.native.pool import Pool

STORED = {
    torch.float64: Stored.F64, torch.float32: Stored.F32, torch.float16: Stored.F16, torch.bfloat16: Stored.BF16,
}  # fmt: skip


class Staging:
    """Host memory that is filled and copied out again and again; pinned where copies are DMA."""

    def __init__(self, pool: Pool, nbytes: int, *, pinned: bool) -> None:
        self.pool = pool
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._used = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []  # bytes here, and where they go

    def reserve(self, targets: Sequence[Tensor]) -> list[Tensor] | None:
        """Bytes for each of these, which `flush` copies there; None where there is no room for all."""
        places, at = [], self._used
        for target in targets:
            at = -(-at // 64) * 64
            places.append(self._memory[at : at + target.nbytes])
            at += target.nbytes
        if at > len(self._memory):
            return None
        self._used = at
        self._waiting += zip(places, targets, strict=True)
        return places

    def flush(self) -> None:
        """Copy everything that was reserved, and wait for it."""
        for place, target in self._waiting:
            target.copy_(place.view(target.dtype).view(target.shape), non_blocking=True)
        devices = {target.device for _, target in self._waiting if target.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)
        self._waiting.clear()
        self._used = 0


class DeviceRows:
    """A plain parameter on a GPU, as the loader sees it: all its dimensions but the last are rows. Bfloat16 is filled,
    other types are written."""

    row_unit = 1

    def __init__(self, tensor: Tensor, staging: Staging) -> None:
        self.shape = tuple(tensor.shape)
        self._rows = tensor.view(-1, tensor.shape[-1])
        self._staging = staging

    def expect(self, stored: str) -> None:
        pass

    def fills(self, rows: StoredRows) -> list[Fill] | None:
        if self._rows.dtype != torch.bfloat16:
            return None
        places = self._staging.reserve([self._rows])
        if places is None:
            return None
        count, columns = self._rows.shape
        to = layout(Format.BF16, count, columns)
        return [Fill(rows, to, places[0].data_ptr(), places[0].nbytes, plain=True)]

    def write(self, first: int, rows: Tensor) -> None:
        rows = rows.reshape(-1, self._rows.shape[1])
        self._rows[first : first + len(rows)].copy_(rows)


class DevicePanels:
    """Rows of one matrix packed for the native kernels, in memory that the CPU may not address.

    `where` tells the matrix's panels, uint8 [panels, panel bytes] (of gate and up: every second one), and their form;
    it is asked once all sinks know what they will get. rows float [rows, columns].
    """

    row_unit = 16

    def __init__(
        self, rows: int, columns: int, expect: Callable[[str], None], where: Callable[[], tuple[Tensor, Form]],
        staging: Staging,
    ) -> None:  # fmt: skip
        self.shape = (rows, columns)
        self.expect = expect
        self._where, self._staging = where, staging

    def fills(self, rows: StoredRows) -> list[Fill] | None:
        panels, form = self._where()
        places = self._staging.reserve([panels])
        return None if places is None else [self._fill(rows, places[0], self.shape[0], form)]

    def write(self, first: int, rows: Tensor) -> None:
        """Raises ValueError where the form is not bfloat16: the staging is too small for the matrix."""
        panels, form = self._where()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        part = panels[first // 16 : -(-(first + len(rows)) // 16)]
        place = torch.empty(part.shape, dtype=torch.uint8)
        stored = StoredRows(STORED[rows.dtype], rows.data_ptr(), rows.stride(0) * rows.itemsize)
        fill(self._staging.pool, [self._fill(stored, place, len(rows), form)])
        part.copy_(place)

    def _fill(self, rows: StoredRows, place: Tensor, count: int, form: Form) -> Fill:
        to = layout(form.format, count, self.shape[1], form.group)
        return Fill(rows, to, place.data_ptr(), place.nbytes)
