"""Writes a safetensors file tensor by tensor.

safetensors' own writer needs all tensors in memory at once; this one keeps only one.
Format: 8 bytes little-endian header length, a JSON header padded with spaces, then the data back to back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Dtype = Literal["bfloat16", "float32"]

_CODES: dict[Dtype, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}


@dataclass(frozen=True)
class Pending:
    """A tensor to be written: `make()` returns its values, float32 of `shape`, when it is written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Array]


def write_safetensors(path: Path, tensors: Iterable[Pending], dtype: Dtype, written: Callable[[int], None]) -> None:
    """Write `tensors` in order as `dtype`; `written` is called with the bytes of each. Raises ValueError for a wrong
    shape."""
    pending = list(tensors)
    code, elem_bytes = _CODES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in pending:
        end = offset + elem_bytes * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in pending:
            values = tensor.make()
            if values.shape != tensor.shape:
                raise ValueError(f"{tensor.name} has shape {values.shape}, declared {tensor.shape}")
            raw = np.ascontiguousarray(to_bfloat16_bits(values) if dtype == "bfloat16" else values)
            file.write(raw.data)
            written(raw.nbytes)


def to_bfloat16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, to nearest, ties to even. NaN is not supported. (numpy has no bfloat16.)"""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)
