"""Headers of weight files -> where each tensor lies. Never: tensor data, models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from proa.errors import WeightsError
from proa.native.formats import Code, Order
from proa.weights.placeholder import refuse_placeholder
from proa.weights.torch_bin import open_bin

# Unquantised types -> bytes per element, by their names in safetensors and GGUF.
PLAIN_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip

Shape = tuple[int, ...]

_LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit

FETCH_AGAIN = "The file is damaged or was not downloaded completely; fetch it again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor, or one quantised matrix made of several tensors.

    dtype is a name such as BF16 or Q4_K; shape has the outermost dimension first; the bytes are
    `file[offset : offset + nbytes]` (offset is 0 in .bin files, which torch reads). quantised: the tensors of a
    quantised matrix; nbytes then counts them all. name: as in the file, for messages.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    quantised: Quantised | None = None
    name: str = ""

    @property
    def rows(self) -> int:
        """Product of all dimensions but the last."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // max(self.rows, 1)


@dataclass(frozen=True, slots=True)
class Quantised:
    """Tensors of a quantised matrix [rows, columns], or of several [count, rows, columns].

    codes: the quantised values, of type `code`, laid out in `order`. scales: one per `scale_rows` rows (0: all rows)
    and `group` columns (0: all columns). zeros: zero points, packed integers, subtracted from the codes. factor: scale
    of the whole matrix; `inverse`: divides instead. zero_offset: added to stored zero points. symmetric: all zero
    points are the middle code. g_idx: group of each column; `ordered`: columns must be sorted by group. In a transposed
    `order`, scales and zeros are transposed too.
    """

    codes: TensorInfo
    code: Code
    scales: TensorInfo
    scale_rows: int
    group: int
    order: Order = Order.ROWS
    zeros: TensorInfo | None = None
    factor: TensorInfo | None = None
    inverse: bool = False
    zero_offset: int = 0
    symmetric: bool = False
    g_idx: TensorInfo | None = None
    ordered: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the matrix."""
        parts = (self.codes, self.scales, self.zeros, self.factor, self.g_idx)
        return sum(part.nbytes for part in parts if part is not None)


def place_of(shape: Shape, flat: int) -> list[int]:
    """The multi-dimensional index of the element with flat index `flat`."""
    found: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        found.insert(0, at)
    return found


def misfit(name: str, wanted: Shape, stored: TensorInfo) -> str:
    """The message for a tensor whose shape is not the one that the config implies."""
    return f"{name}: the config says {list(wanted)}, {stored.file.name} has {list(stored.shape)}"


def ends_too_early(tensor: TensorInfo) -> WeightsError:
    """Make the error for a file that has become shorter since its header was read."""
    return WeightsError(
        f"{tensor.file} ends too early: {tensor.name} should lie at bytes {tensor.offset} to "
        f"{tensor.offset + tensor.nbytes}, but the file has {tensor.file.stat().st_size}.",
        FETCH_AGAIN,
    )


def safetensors_index(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """Index the tensors of safetensors files. Raises WeightsError for damaged files and names that appear twice."""
    index: dict[str, TensorInfo] = {}
    for file in files:
        merge(index, _safetensors_header(file))
    return index


def _safetensors_header(file: Path) -> dict[str, TensorInfo]:
    """Format: u64 header length, JSON header, data; https://huggingface.co/docs/safetensors."""
    refuse_placeholder(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER_BYTES):
            raise WeightsError(
                f"{file}: the header should have {length} bytes, but the file has only {size}.", FETCH_AGAIN
            )
        raw = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        entries = list(header.items())
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{file}: the safetensors header is not a JSON object ({type(error).__name__}: {error}).", FETCH_AGAIN
        ) from error
    found = {name: _safetensor(file, name, 8 + length, entry) for name, entry in entries}
    _refuse_gaps(file, found, 8 + length, size)
    return found


def _safetensor(file: Path, name: str, data_start: int, entry: Any) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        for number in (*shape, begin, end, end - begin):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is not a size")
    except (ValueError, TypeError, KeyError) as error:
        raise WeightsError(
            f"{file}: the header's entry for {name} is {str(entry)[:200]!r}; a dtype, a shape and two data_offsets "
            "were expected, sizes being integers of at least 0.",
            FETCH_AGAIN,
        ) from error
    if dtype in PLAIN_BYTES and (expected := prod(shape) * PLAIN_BYTES[dtype]) != end - begin:
        raise WeightsError(
            f"{file}: {name} is {dtype} {list(shape)}, which takes {expected} bytes, but the header gives it "
            f"{end - begin} (data_offsets {begin} to {end}).",
            FETCH_AGAIN,
        )
    return TensorInfo(dtype, shape, file, data_start + begin, end - begin, name=name)


def _refuse_gaps(file: Path, found: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Raise WeightsError unless the tensors cover the file's data without gaps, as the format requires."""
    at, before = data_start, "the header"
    for tensor in sorted(found.values(), key=attrgetter("offset", "nbytes")):
        if tensor.offset != at:
            raise WeightsError(
                f"{file}: {tensor.name} should begin at byte {at}, where {before} ends, but its data_offsets say byte "
                f"{tensor.offset}.",
                FETCH_AGAIN,
            )
        at, before = tensor.offset + tensor.nbytes, tensor.name
    if at != size:
        raise WeightsError(f"{file}: the header describes {at} bytes, but the file has {size}.", FETCH_AGAIN)


def bin_index(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """Index the tensors of PyTorch files, opened with weights_only, so that no code in them can run."""
    names = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    index: dict[str, TensorInfo] = {}
    for file in files:
        found = {}
        for name, tensor in open_bin(file).items():
            kind = str(tensor.dtype).removeprefix("torch.")
            found[name] = TensorInfo(names.get(kind, kind), tuple(tensor.shape), file, 0, tensor.nbytes, name=name)
        merge(index, found)
    return index


def listed_files(index_file: Path) -> dict[str, str]:
    """Tensor -> name of its file, by a *.index.json. Raises WeightsError if it cannot be read."""
    refuse_placeholder(index_file)
    try:
        listed = json.loads(index_file.read_bytes())["weight_map"].items()
        return {str(tensor): Path(name).name for tensor, name in listed}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index_file}: cannot be read ({type(error).__name__}: {error}).", FETCH_AGAIN) from error


def shard_files(index_file: Path) -> list[Path]:
    """The files listed in a *.index.json. Raises WeightsError if it cannot be read or files are missing."""
    files = [index_file.parent / name for name in sorted(set(listed_files(index_file).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsError(
            f"{index_file.parent}: {len(missing)} of {len(files)} weight files are missing, the first is {missing[0]}.",
            "Download the model completely.",
        )
    return files


def merge(index: dict[str, TensorInfo], found: Mapping[str, TensorInfo]) -> None:
    """Add the tensors of one more file to an index. Raises WeightsError for a name that is in both."""
    for name, tensor in found.items():
        if name in index:
            raise WeightsError(
                f"The tensor {name} is both in {index[name].file} and in {tensor.file}.",
                "Leave only one set of weight files in the folder.",
            )
        index[name] = tensor
