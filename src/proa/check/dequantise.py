"""Dequantises stored matrices in plain torch and numpy, from the descriptions of their formats. Never: the native
library, packing, which tensors make a matrix.

Proa's loader (weights/coded.py, csrc/src/coded.h) is what is checked, so none of it is used here. GGUF types are
dequantised by the gguf package.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from proa.native.formats import Code, Order
from proa.weights.index import Quantised, TensorInfo, ends_too_early

_PLAIN = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # row i of eight lies in the 4-bit field _AWQ_FIELDS[i] of an int32 word
_DIVIDES = "weight_global_scale"  # compressed-tensors' name of the one factor that divides instead of multiplying


def plain_rows(info: TensorInfo, first: int, count: int) -> Tensor:
    """Rows [first, first + count) of a tensor that is one stored block of bytes, as float32 [count, columns]. Raises
    WeightsError if the file ends before."""
    raw = _bytes(info, first * info.row_bytes, count * info.row_bytes)
    if info.dtype in _PLAIN:
        return raw.view(_PLAIN[info.dtype]).view(count, -1).float()
    kind = gguf.GGMLQuantizationType[info.dtype]
    return torch.from_numpy(gguf.quants.dequantize(raw.view(count, -1).numpy(), kind))


def matrix(info: TensorInfo, of: Quantised, number: int) -> Tensor:
    """Matrix `number` of a quantised tensor [..., rows, columns], as float32 [rows, columns]: (code - zero) * scale,
    times the matrix's factor. Raises WeightsError."""
    rows, columns = info.shape[-2:]
    part = number, info.rows // rows
    scales = _spread(_scales(of, *part, rows), of, rows, columns, _groups(of, columns, *part))
    codes = _codes(of, *part, rows, columns)
    if of.zeros is not None and not of.symmetric:
        zeros = _zeros(of, of.zeros, *part, rows)
        codes = codes - _spread(zeros, of, rows, columns, _groups(of, columns, *part))
    elif of.code in (Code.INT4, Code.UINT4):
        codes = codes - 8
    elif of.code is Code.UINT8:
        codes = codes - 128
    values = codes * scales
    if of.factor is None:
        return values
    factor = float(_part(of.factor, *part).view(torch.float32))
    return values / factor if of.factor.name.endswith(_DIVIDES) else values * factor


def _codes(of: Quantised, number: int, count: int, rows: int, columns: int) -> Tensor:
    """Codes as float32 [rows, columns]. Nibbles and UINT8 are not yet offset, except those in two's complement."""
    raw = _part(of.codes, number, count)
    if of.order is Order.ROWS:
        return _decoded(raw.view(rows, -1), of.code)[:, :columns]
    words = raw.view(torch.int32)
    if of.order is Order.AWQ:  # [columns, rows / 8]
        fields = torch.stack([words.view(columns, -1) >> 4 * place & 15 for place in _AWQ_FIELDS], 2)
        return fields.reshape(columns, rows).T.float()
    bits = 8 if of.code is Code.UINT8 else 4  # GPTQ: [columns * bits / 32, rows]
    fields = torch.stack([words.view(-1, rows) >> bits * i & (1 << bits) - 1 for i in range(32 // bits)], 1)
    return fields.reshape(columns, rows).T.float()


def _decoded(raw: Tensor, code: Code) -> Tensor:
    match code:
        case Code.E4M3:
            return raw.view(torch.float8_e4m3fn).float()
        case Code.INT8:
            return raw.view(torch.int8).float()
        case Code.UINT8:
            return raw.float()
    nibbles = torch.stack([raw & 15, raw >> 4], -1).flatten(-2)
    match code:
        case Code.E2M1:
            return _E2M1[nibbles.long()]
        case Code.SIGNED4:
            return nibbles.float() - 16 * (nibbles > 7)
        case Code.INT4 | Code.UINT4:
            return nibbles.float()
    raise ValueError(f"{code.name} has no reference: add it to check/dequantise.py")


def _scales(of: Quantised, number: int, count: int, rows: int) -> Tensor:
    """float32 [rows of scales, groups]."""
    raw = _part(of.scales, number, count)
    match of.scales.dtype:
        case "F8_E8M0" | "U8":
            values = torch.exp2(raw.float() - 127).masked_fill(raw == 255, torch.nan)
        case dtype:
            values = raw.view(_PLAIN[dtype]).float()
    if of.order is not Order.ROWS:
        return values.view(-1, rows).T
    return values.view(-(-rows // of.scale_rows) if of.scale_rows else 1, -1)


def _zeros(of: Quantised, zeros: TensorInfo, number: int, count: int, rows: int) -> Tensor:
    """Zero points as float32 [rows, groups]."""
    bits = 8 if of.code is Code.UINT8 else 4
    words = _part(zeros, number, count).view(torch.int32)
    by_rows = of.order is Order.ROWS  # words [rows * bits / 32, groups], else [groups, rows * bits / 32]
    words = words.view(-(-rows * bits // 32), -1) if by_rows else words.view(-1, rows * bits // 32).T
    places = _AWQ_FIELDS if of.order is Order.AWQ else range(32 // bits)
    fields = torch.stack([words >> bits * place for place in places], 1).flatten(0, 1)
    return (fields + of.zero_offset & (1 << bits) - 1)[:rows].float()


def _groups(of: Quantised, columns: int, number: int, count: int) -> Tensor:
    """The group of each column, int64 [columns]."""
    sorted_groups = torch.arange(columns) // (of.group or columns)
    if of.g_idx is None:
        return sorted_groups
    found = _part(of.g_idx, number, count).view(torch.int32).long()
    return sorted_groups if bool((found == -1).all()) else found


def _spread(values: Tensor, of: Quantised, rows: int, columns: int, groups: Tensor) -> Tensor:
    """Numbers by rows of scales and group, repeated for each element: [rows, columns]."""
    height = of.scale_rows if of.order is Order.ROWS else 1
    by_row = values.expand(rows, -1) if not height else values.repeat_interleave(height, 0)[:rows]
    return by_row[:, groups]


def _part(info: TensorInfo, number: int, count: int) -> Tensor:
    """Part `number` of the `count` equal parts of a tensor: uint8."""
    nbytes = info.nbytes // count
    return _bytes(info, number * nbytes, nbytes)


def _bytes(info: TensorInfo, first: int, nbytes: int) -> Tensor:
    found = np.fromfile(info.file, np.uint8, nbytes, offset=info.offset + first)
    if len(found) < nbytes:
        raise ends_too_early(info)
    return torch.from_numpy(found)
