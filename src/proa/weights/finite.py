"""Non-finite values (NaN, infinity) in a checkpoint: detected while it is loaded, then reported with file, tensor and
index. Never: non-finite values at run time (hybrid/faults).

Workers report only which job met a non-finite value (csrc/src/finite.h); its index is searched for once loading has
failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from proa.errors import WeightsError
from proa.native.formats import Code
from proa.weights.index import PLAIN_BYTES, TensorInfo, place_of
from proa.weights.rows import open_rows
from proa.weights.source import Source

_CHUNK_BYTES = 16 << 20
_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.float8_e8m0fnu,
}  # fmt: skip
_REMEDY = (
    "Weights must be finite. Compare the file's checksum with the published one: if they differ, fetch the "
    "file again; if they are equal, the model was published broken, so use another version or quantisation of it."
)


def is_finite(numbers: Tensor) -> bool:
    """True if no element is NaN or infinite; any float dtype and shape."""
    if not numbers.numel():
        return True
    low, high = torch.aminmax(numbers)  # NaN propagates
    return bool(low.isfinite() & high.isfinite())


def not_finite(tensors: Mapping[str, TensorInfo], *sources: Source) -> WeightsError:
    """Make the error for sources in which NaN, infinity or a value beyond bfloat16 was found; reads them again to find
    its index."""
    for source in sources:
        info = tensors[source.tensor]
        found = _in_scales(info.quantised.scales) if info.quantised else None
        if found := found or _in_rows(tensors, source, info):
            return found
    names = ", ".join(f"{tensors[source.tensor].file}: {source.tensor}" for source in sources)
    return WeightsError(f"{names}: a value is NaN or infinite.", _REMEDY)


def _in_rows(tensors: Mapping[str, TensorInfo], source: Source, info: TensorInfo) -> WeightsError | None:
    step = max(1, _CHUNK_BYTES // max(1, info.shape[-1] * 4))
    end = source.first_row + (source.rows - 1) * source.row_step + 1
    with open_rows(info.file, tensors) as rows:
        for first in range(source.first_row, end, step):
            chunk = rows.read(source.tensor, first, min(step, end - first))
            bad = (~chunk.bfloat16().isfinite()).nonzero()
            if len(bad):
                row, column = bad[0].tolist()
                return _error(source.tensor, info, first + row, column, float(chunk[row, column]))
    return None


def _in_scales(scales: TensorInfo) -> WeightsError | None:
    with scales.file.open("rb") as stream:
        stream.seek(scales.offset)
        raw = torch.frombuffer(bytearray(stream.read(scales.nbytes)), dtype=torch.uint8)
    values = raw.view(_TORCH[scales.dtype]).float()
    bad = (~values.isfinite()).nonzero()
    if not len(bad):
        return None
    at = int(bad[0])
    place = place_of(scales.shape, at)
    return WeightsError(f"{scales.file}: the scale {scales.name} is {float(values[at])} at {place}.", _REMEDY)


def _error(tensor: str, info: TensorInfo, row: int, column: int, value: float) -> WeightsError:
    place = place_of(info.shape, row * info.shape[-1] + column)
    if math.isfinite(value):
        problem = f"{tensor} is {value:g} at {place}, which is beyond bfloat16's range"
        return WeightsError(f"{info.file}: {problem}.", "If the value is right, use --dtype float32.")
    if info.quantised:
        codes = info.quantised.codes
        if info.quantised.code is Code.E4M3 and math.isnan(value):
            return WeightsError(f"{codes.file}: {codes.name} is NaN (0x7f or 0xff) at {place}.", _REMEDY)
        return WeightsError(f"{codes.file}: {tensor}, dequantised, is {value} at {place}.", _REMEDY)
    if info.dtype not in PLAIN_BYTES:
        problem = f"the {info.dtype} block of {tensor} at {place} has a scale that is NaN or infinite"
        return WeightsError(f"{info.file}: {problem}.", _REMEDY)
    return WeightsError(f"{info.file}: {tensor} is {value} at {place}.", _REMEDY)
