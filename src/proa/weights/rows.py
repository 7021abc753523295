"""Open weight files, and rows of their tensors as floats. Never: which rows to read, where they go."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from proa.native.fill import StoredRows, to_float
from proa.native.formats import Order, Stored, stored_types
from proa.ops.staging import STORED
from proa.weights.coded import CodedFiles, read_bytes
from proa.weights.index import TensorInfo
from proa.weights.torch_bin import open_bin

_PLAIN = {stored.name: dtype for dtype, stored in STORED.items()}


class Rows(Protocol):
    """An open weight file. Tensors are seen as [rows, columns], all dimensions but the last flattened to rows."""

    def __enter__(self) -> Rows: ...
    def __exit__(self, *error: object) -> None: ...

    def read(self, tensor: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count) as floats of any type, valid until the next call. Raises WeightsError."""

    def stored(self, tensor: str, first: int, column: int, transposed: bool) -> StoredRows | None:
        """Locate rows from `first` and columns from `column` on in the file, which divide no units (weights/source.py);
        None if only `read` can read them."""

    def read_into(self, tensor: str, first: int, out: Tensor) -> bool:
        """Read rows into `out` if they are stored with its dtype and it is contiguous; else return False."""


def open_rows(file: Path, tensors: Mapping[str, TensorInfo]) -> Rows:
    """Open a weight file; tensors: the index of its tensors, by the file's names."""
    return _MappedRows(file) if file.suffix == ".bin" else _FileRows(file, tensors)


class _FileRows:
    """safetensors and GGUF files: read() into one buffer, not mapped."""

    def __init__(self, file: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._file = file
        self._tensors = tensors
        self._stream = file.open("rb", buffering=0)
        self._buffer = torch.empty(0, dtype=torch.uint8)  # both are reused: new ones would fragment memory
        self._floats = torch.empty(0, dtype=torch.float32)
        self._coded = CodedFiles()

    def __enter__(self) -> _FileRows:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._coded.close()

    def read(self, tensor: str, first: int, count: int) -> Tensor:
        info = self._tensors[tensor]
        if info.quantised:
            return self._coded.read(info, first, count)
        size = count * info.row_bytes
        self._buffer = _at_least(size, self._buffer)
        raw = self._buffer[:size]
        read_bytes(self._stream, info, first * info.row_bytes, raw)
        if info.dtype in _PLAIN:
            return raw.view(_PLAIN[info.dtype]).view(count, -1)
        self._floats = _at_least(count * info.shape[-1], self._floats)
        floats = self._floats[: count * info.shape[-1]].view(count, -1)
        to_float(Stored[info.dtype], raw.data_ptr(), size, floats.numel(), floats.data_ptr())
        return floats

    def stored(self, tensor: str, first: int, column: int, transposed: bool) -> StoredRows:
        info = self._tensors[tensor]
        if info.quantised:
            return self._coded.stored(info, first, column)
        known = stored_types()[info.dtype]
        start = info.offset + first * info.row_bytes + column // known.block_values * known.block_bytes
        order = Order.TRANSPOSED if transposed else Order.ROWS
        return StoredRows(Stored[info.dtype], start, info.row_bytes, self._stream.fileno(), order)

    def read_into(self, tensor: str, first: int, out: Tensor) -> bool:
        info = self._tensors[tensor]
        if _PLAIN.get(info.dtype) != out.dtype or not out.is_contiguous():
            return False
        read_bytes(self._stream, info, first * info.row_bytes, out.view(torch.uint8).view(-1))
        return True


def _at_least(size: int, buffer: Tensor) -> Tensor:
    return buffer if buffer.numel() >= size else torch.empty(size, dtype=buffer.dtype)


class _MappedRows:
    """PyTorch files, which torch parses and maps."""

    def __init__(self, file: Path) -> None:
        self._tensors = open_bin(file)
        self._last: Tensor | None = None
        self._copy: tuple[str, Tensor] | None = None  # the last tensor whose rows are not contiguous in the file

    def __enter__(self) -> _MappedRows:
        return self

    def __exit__(self, *error: object) -> None:
        self._last = self._copy = None
        self._tensors.clear()

    def read(self, tensor: str, first: int, count: int) -> Tensor:
        if self._last is not None:
            _forget_pages(self._last)
            self._last = None
        stored = self._tensors[tensor]
        if stored.is_contiguous():
            self._last = stored.view(-1, stored.shape[-1])[first : first + count]
            return self._last
        if self._copy is None or self._copy[0] != tensor:  # on the heap, whose pages must not be dropped
            self._copy = tensor, stored.reshape(-1, stored.shape[-1])
        return self._copy[1][first : first + count]

    def stored(self, tensor: str, first: int, column: int, transposed: bool) -> None:
        return None

    def read_into(self, tensor: str, first: int, out: Tensor) -> bool:
        return False


def _forget_pages(tensor: Tensor) -> None:
    """Drop the mapped pages of a tensor, which would count as this process's memory."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr() // page * page
    end = tensor.data_ptr() + tensor.nbytes
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
