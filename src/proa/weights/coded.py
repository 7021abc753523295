"""Reads matrices of quantised checkpoints: their codes (quantised values) stay in the file until they are decoded or
packed, their scales are read into memory. Never: which tensors make a matrix (quantised.py), packing.
"""

from __future__ import annotations

from dataclasses import replace
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from proa.errors import WeightsError
from proa.native.fill import Scales, StoredRows, decode, to_float
from proa.native.formats import PANEL_ROWS, QUANTISED, Code, Order, Stored, facts, stored_facts
from proa.ops.staging import STORED
from proa.weights.index import FETCH_AGAIN, Quantised, TensorInfo, ends_too_early, place_of
from proa.weights.source import AWQ_ROWS

_TORCH = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.uint8, "U8": torch.uint8,
    "F8_E8M0": torch.uint8, "I32": torch.int32,
}  # fmt: skip
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # row i of eight is the 4-bit field _AWQ_PLACES[i] of an int32 word


def read_bytes(stream: FileIO, tensor: TensorInfo, first: int, out: Tensor) -> None:
    """Fill `out` (uint8) with bytes of a tensor, from byte `first` on. Raises WeightsError if the file ends before."""
    view, done = out.numpy().data, 0
    stream.seek(tensor.offset + first)
    while done < len(view):
        got = stream.readinto(view[done:])
        if not got:
            raise ends_too_early(tensor)
        done += got


class CodedFiles:
    """The open files over which quantised matrices are spread. Not thread-safe."""

    def __init__(self) -> None:
        self._streams: dict[Path, FileIO] = {}
        self._last: tuple[tuple[TensorInfo, int], Scales] | None = None

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def stored(self, info: TensorInfo, first: int, column: int = 0) -> StoredRows:
        """Locate rows from `first` and columns from `column` on in the file, up to the end of their matrix; rows are
        counted over all matrices of the tensor. Both are multiples of `stored_units`."""
        of = _quantised(info)
        fd, per_byte = self._stream(of.codes.file).fileno(), stored_facts(of.code).block_values
        if of.order is not Order.ROWS:
            skipped = column if of.order is Order.AWQ else column // (4 * per_byte)
            start, scales = of.codes.offset + skipped * of.codes.row_bytes, self._scales(info, 0)
            return StoredRows(of.code, start, of.codes.row_bytes, fd, of.order, scales.after(column)).after(first)
        row_bytes = of.codes.nbytes // info.rows
        start = of.codes.offset + first * row_bytes + column // per_byte
        return StoredRows(of.code, start, row_bytes, fd, of.order, self._scales(info, first).after(column))

    def read(self, info: TensorInfo, first: int, count: int) -> Tensor:
        """Rows [first, first + count), of one matrix or several, as float32 [count, columns]."""
        columns, height = info.shape[-1], info.shape[-2]
        out = torch.empty(count, columns)
        done = 0
        while done < count:
            at = first + done
            here = min(count - done, height - at % height)
            self._decode(info, at, out[done : done + here])
            done += here
        return out

    def _decode(self, info: TensorInfo, first: int, out: Tensor) -> None:
        of = _quantised(info)
        if of.order is not Order.ROWS:
            codes = self._bytes(of.codes, 0, of.codes.nbytes)
            transposed = StoredRows(
                of.code, codes.data_ptr(), of.codes.row_bytes, order=of.order, scales=self._scales(info, 0)
            )
            before = first % AWQ_ROWS if of.order is Order.AWQ else 0
            after = -(before + len(out)) % AWQ_ROWS if of.order is Order.AWQ else 0
            whole = torch.empty(before + len(out) + after, out.shape[1])
            decode(transposed.after(first - before), len(whole), whole.shape[1], whole.data_ptr())
            out.copy_(whole[before : before + len(out)])
            return
        row_bytes = of.codes.nbytes // info.rows
        codes = self._bytes(of.codes, first * row_bytes, len(out) * row_bytes)
        rows = StoredRows(of.code, codes.data_ptr(), row_bytes, scales=self._scales(info, first))
        decode(rows, len(out), out.shape[1], out.data_ptr())

    def _scales(self, info: TensorInfo, first: int) -> Scales:
        """Scales of the matrix that contains row `first`; the result's `first` is the row within that matrix."""
        of, height = _quantised(info), info.shape[-2]
        matrix, row = divmod(first, height)
        if self._last is None or self._last[0] != (info, matrix):
            self._last = (info, matrix), self._read_scales(info, of, matrix)
        return replace(self._last[1], first=row)

    def _read_scales(self, info: TensorInfo, of: Quantised, matrix: int) -> Scales:
        height = info.shape[-2]
        values = _as_kept(self._part(info, of.scales, matrix), info.dtype)
        if info.dtype == "NVFP4" and bool((values >= 0x7F).any()):
            raise _bad_nvfp4_scale(of.scales, values, matrix)
        if of.order is not Order.ROWS:
            values = values.view(-1, height).T.contiguous()
        group_of = self._order(info, of, of.g_idx) if of.g_idx else None
        rows = of.scale_rows or PANEL_ROWS  # 0: all rows share one row of scales
        scale_rows = -(-height // of.scale_rows) if of.scale_rows else 1
        mins = None
        if of.zeros is not None:
            values = values.view(scale_rows, -1)
            zeros = self._zeros(info, of, of.zeros, matrix, values.shape[1])
            middle = 128 if of.code is Code.UINT8 else 0  # `code` is stored with this offset
            mins = None if of.symmetric else (middle - zeros) * values  # exact: integers of 4 or 9 bits times 16 bits
        stride, min_data = values.nbytes // scale_rows if of.scale_rows else 0, 0 if mins is None else mins.data_ptr()
        alive = (values, mins, group_of)
        nbytes = sum(tensor.nbytes for tensor in alive if tensor is not None)
        found = Scales(
            _kind(values, of), values.data_ptr(), stride, rows, 0, of.group, alive, nbytes, min_data,
            group_of=0 if group_of is None else group_of.data_ptr(),
        )  # fmt: skip
        return found if of.factor is None else replace(found, factor=self._factor(info, of, of.factor, matrix))

    def _zeros(self, info: TensorInfo, of: Quantised, zeros: TensorInfo, matrix: int, groups: int) -> Tensor:
        """Unpack the zero points of one matrix: int32 [rows, groups]. Raises WeightsError if they contradict `sym`."""
        bits = 8 if of.code is Code.UINT8 else 4
        words = self._part(info, zeros, matrix)
        words = words.view(-1, groups) if of.order is Order.ROWS else words.view(groups, -1).T
        places = _AWQ_PLACES if of.order is Order.AWQ else range(32 // bits)
        unpacked = torch.stack([words >> bits * place for place in places], 1).flatten(0, 1)
        found = (unpacked + of.zero_offset & (1 << bits) - 1)[: info.shape[-2]]
        if of.symmetric and bool((found != 1 << bits - 1).any()):
            raise WeightsError(
                f"{zeros.file}: config.json says that the quantisation is symmetric (sym), so all zero points of "
                f"{zeros.name} must be {1 << bits - 1}, but some differ.",
                "If the config is wrong, set sym to false in its quantization_config.",
            )
        return found

    def _order(self, info: TensorInfo, of: Quantised, g_idx: TensorInfo) -> Tensor | None:
        """The group of each column, int32 [columns]; None if columns are sorted by group (no act-order). Raises
        WeightsError for groups out of range, or unsorted where the config says that they are sorted."""
        columns, found = info.shape[-1], self._part(info, g_idx, 0)
        group = of.group or columns
        if bool((found == -1).all()):  # g_idx is unused
            return None
        if of.ordered and not torch.equal(found.long(), torch.arange(columns) // group):
            raise WeightsError(
                f"{g_idx.file}: the config says that columns are sorted by group (desc_act is false), but {g_idx.name} "
                f"does not sort them into groups of {group}.",
                "If the config is wrong, set desc_act to true in its quantization_config.",
            )
        beyond = ((found < 0) | (found >= columns // group)).nonzero()
        if not of.ordered and len(beyond):
            column = int(beyond[0])
            raise WeightsError(
                f"{g_idx.file}: {g_idx.name} is {int(found[column])} at [{column}], but {of.scales.name} has only the "
                f"groups 0 to {columns // group - 1}.",
                FETCH_AGAIN,
            )
        return None if of.ordered else found

    def _factor(self, info: TensorInfo, of: Quantised, factor: TensorInfo, matrix: int) -> float:
        value = float(self._part(info, factor, matrix))
        if not 0 < value < float("inf"):
            raise WeightsError(
                f"{factor.file}: {factor.name}, the scale of a whole matrix, is {value}; a finite number above 0 was "
                "expected.",
                FETCH_AGAIN,
            )
        return 1 / value if of.inverse else value

    def _part(self, info: TensorInfo, tensor: TensorInfo, matrix: int) -> Tensor:
        """The part of a tensor that belongs to one matrix, in the tensor's dtype, flat."""
        nbytes = tensor.nbytes * info.shape[-2] // info.rows
        return self._bytes(tensor, matrix * nbytes, nbytes).view(_TORCH[tensor.dtype])

    def _bytes(self, tensor: TensorInfo, first: int, nbytes: int) -> Tensor:
        """Read `nbytes` bytes of a tensor from its byte `first` on. Raises WeightsError if the file ends before."""
        found = torch.empty(nbytes, dtype=torch.uint8)
        read_bytes(self._stream(tensor.file), tensor, first, found)
        return found

    def _stream(self, file: Path) -> FileIO:
        if file not in self._streams:
            self._streams[file] = file.open("rb", buffering=0)
        return self._streams[file]


def _quantised(info: TensorInfo) -> Quantised:
    if info.quantised is None:
        raise ValueError(f"a tensor of {info.dtype} has no scales")
    return info.quantised


def _bad_nvfp4_scale(scales: TensorInfo, codes: Tensor, matrix: int) -> WeightsError:
    """Make the error for scales of `matrix` of which some are negative or NaN; codes: their E4M3 bytes."""
    at = int((codes >= 0x7F).nonzero()[0])
    value = float(codes.view(torch.float8_e4m3fn)[at])
    place = place_of(scales.shape, matrix * len(codes) + at)
    return WeightsError(
        f"{scales.file}: {scales.name} is {value} at {place}; NVFP4 scales must be finite and not negative.",
        FETCH_AGAIN,
    )


def _as_kept(scales: Tensor, stored: str) -> Tensor:
    """Scales in the dtype of the packed format, which holds them exactly; float32 if no packed format keeps them."""
    kept = QUANTISED.get(stored)
    if kept and facts(kept.format).scale not in ("f32", "f32_panel"):
        return scales
    if scales.dtype is not torch.uint8:
        return scales.float()
    powers = torch.empty(scales.shape)
    to_float(Code.E8M0, scales.data_ptr(), scales.nbytes, scales.numel(), powers.data_ptr())
    return powers


def _kind(scales: Tensor, of: Quantised) -> Stored | Code:
    if scales.dtype is torch.uint8:
        return Code.E4M3 if of.scales.dtype == "F8_E4M3" else Code.E8M0
    return STORED[scales.dtype]
