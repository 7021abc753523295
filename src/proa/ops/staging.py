"""Staging of weights for a GPU: workers fill pinned host memory, from which they are copied. Never: which weights go to
the GPU.

A sink returns jobs that fill its part of the staging memory; after each batch of jobs the loader calls `flush`. Rows
that no job can fill are written by `write`, one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proa.native.fill import Fill, StoredRows, fill
from proa.native.formats import PANEL_ROWS, Form, Format, Stored, layout
from proa.native.pool import Pool
from proa.ops.table import Sink

STORED = {
    torch.float64: Stored.F64, torch.float32: Stored.F32, torch.float16: Stored.F16, torch.bfloat16: Stored.BF16,
}  # fmt: skip


class Staging:
    """Reusable host memory that is filled, then copied to the device; pinned if copies use DMA."""

    def __init__(self, pool: Pool, nbytes: int, *, pinned: bool) -> None:
        self.pool = pool
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._used = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []  # (staged bytes, destination)

    def reserve(self, targets: Sequence[Tensor]) -> list[Tensor] | None:
        """Reserve bytes for each target, which `flush` will copy there; None if there is no room for all."""
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
        """Copy all reserved bytes to their targets, wait for the copies, and free the staging memory."""
        for place, target in self._waiting:
            target.copy_(place.view(target.dtype).view(target.shape), non_blocking=True)
        devices = {target.device for _, target in self._waiting if target.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)
        self._waiting.clear()
        self._used = 0


class DeviceRows:
    """The sink of an unpacked parameter on a GPU; all dimensions but the last are rows. bfloat16 is filled by workers,
    other dtypes by `write`."""

    row_unit = 1

    def __init__(self, tensor: Tensor, staging: Staging) -> None:
        self.shape = tuple(tensor.shape)
        self._rows = tensor.view(-1, tensor.shape[-1])
        self._staging = staging

    def expect(self, stored: str) -> None:
        pass

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> list[Fill] | None:
        if self._rows.dtype != torch.bfloat16:
            return None
        part = self._rows[first:] if count is None else self._rows[first : first + count]
        places = self._staging.reserve([part])
        if places is None:
            return None
        return [Fill(rows, layout(Format.BF16, *part.shape), places[0].data_ptr(), places[0].nbytes, plain=True)]

    def write(self, first: int, rows: Tensor) -> None:
        rows = rows.reshape(-1, self._rows.shape[1])
        self._rows[first : first + len(rows)].copy_(rows)


class DecidedLater:
    """The sink of a matrix [rows, columns] on a GPU whose form is chosen later: `where` returns the actual sink, packed
    or plain; it is called only after `expect` was called for all sinks."""

    row_unit = PANEL_ROWS

    def __init__(self, shape: tuple[int, int], expect: Callable[[str], None], where: Callable[[], Sink]) -> None:
        self.shape, self.expect, self._where = shape, expect, where

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> Sequence[Fill] | None:
        return self._where().fills(rows, first, count)

    def write(self, first: int, rows: Tensor) -> None:
        self._where().write(first, rows)


class DevicePanels:
    """The sink of a packed matrix [rows, columns] in device memory.

    where: returns the matrix's panels, uint8 [panels, panel bytes] (for gate or up, every second one), and their form;
    called only after `expect` was called for all sinks.
    """

    row_unit = PANEL_ROWS

    def __init__(
        self, rows: int, columns: int, expect: Callable[[str], None], where: Callable[[], tuple[Tensor, Form]],
        staging: Staging,
    ) -> None:  # fmt: skip
        self.shape = (rows, columns)
        self.expect = expect
        self._where, self._staging = where, staging

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> list[Fill] | None:
        panels, form = self._where()
        count = self.shape[0] - first if count is None else count
        places = self._staging.reserve([_rows_of(panels, first, count)])
        return None if places is None else [self._fill(rows, places[0], count, form)]

    def write(self, first: int, rows: Tensor) -> None:
        """Pack float rows and copy them to the device. Raises ValueError unless the form is bfloat16: rows are never
        quantised."""
        panels, form = self._where()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        part = _rows_of(panels, first, len(rows))
        place = torch.empty(part.shape, dtype=torch.uint8)
        stored = StoredRows(STORED[rows.dtype], rows.data_ptr(), rows.stride(0) * rows.itemsize)
        fill(self._staging.pool, [self._fill(stored, place, len(rows), form)])
        part.copy_(place)

    def _fill(self, rows: StoredRows, place: Tensor, count: int, form: Form) -> Fill:
        to = layout(form.format, count, self.shape[1], form.group)
        return Fill(rows, to, place.data_ptr(), place.nbytes)


def _rows_of(panels: Tensor, first: int, count: int) -> Tensor:
    """The panels of `count` rows from `first` on, a multiple of PANEL_ROWS."""
    return panels[first // PANEL_ROWS : -(-(first + count) // PANEL_ROWS)]
