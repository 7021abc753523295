"""GGUF headers: metadata, and where each tensor lies. Never: tensor data, meaning of keys.

The gguf package's reader makes an array of every vocabulary entry: 6 s and 500 MB for 150 000 tokens. This reader
skips string arrays, which only the tokenizer needs, unless keep_vocabulary is set. Format: GGUF specification,
versions 2 and 3.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from proa.errors import WeightsError
from proa.native.formats import Stored, stored_types
from proa.weights.index import FETCH_AGAIN, TensorInfo, merge
from proa.weights.placeholder import refuse_placeholder

# Type ids of tensors; the names are those of the gguf package.
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


def blocks() -> dict[str, tuple[int, int]]:
    """Types that can be loaded -> (elements, bytes) of a block. Raises NativeError without a native library."""
    known = {of.name: stored_types()[of.name] for of in Stored if of is not Stored.F64}  # which GGUF files do not have
    return {name: (of.block_values, of.block_bytes) for name, of in known.items()}


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_SHORTEST_KEY_BYTES, _SHORTEST_TENSOR_BYTES = 13, 32  # length, type, value; length, dimensions, type, offset
_LONGEST_NAME_BYTES = 65535  # the specification's limit for keys; names of tensors are shorter
_LONGEST_TEXT_BYTES = 1 << 26
_LONGEST_ARRAY = 4096  # longer arrays belong to the vocabulary
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class BrokenHeader(Exception):
    """The header is cut off or contradicts itself, as the message says; becomes the cause of a WeightsError."""


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def gguf_index(file: Path) -> GgufHeader:
    """Read the header of a GGUF file, or of all parts of a split one; `file` may be any part.

    Raises WeightsError for damaged files, missing parts, tensors in two parts and tensors of types that cannot be
    loaded.
    """
    first, *rest = _parts(file)
    header = _read(first)
    for part in rest:
        merge(header.tensors, _read(part).tensors)
    return header


def gguf_metadata(file: Path) -> dict[str, Any]:
    """Read all metadata by key, including the vocabulary; for a split model, from its first part.

    Raises WeightsError for damaged files. 0.1 s for 150 000 tokens.
    """
    return _read(_parts(file)[0], keep_vocabulary=True).metadata


def is_later_part(file: Path) -> bool:
    """True for a part of a split model, by its name, unless it is the first."""
    match = _SPLIT.fullmatch(file.name)
    return match is not None and int(match["number"]) > 1


def _parts(file: Path) -> list[Path]:
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    parts = [file.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise WeightsError(
            f"{file.parent}: {len(missing)} of the {count} parts of {file.name} are missing, "
            f"the first is {missing[0]}.",
            "Download them all into one folder.",
        )
    return parts


def _read(file: Path, keep_vocabulary: bool = False) -> GgufHeader:
    refuse_placeholder(file)
    size = file.stat().st_size
    if size < 24:
        raise WeightsError(f"{file}: only {size} bytes long; a GGUF header has at least 24.", FETCH_AGAIN)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Cursor(file, data, keep_vocabulary).header()
        except BrokenHeader as error:
            raise WeightsError(f"{file}: {error}.", FETCH_AGAIN) from error


class _Cursor:
    """Reads a GGUF header from front to back. Raises BrokenHeader, and WeightsError for unimplemented types."""

    def __init__(self, file: Path, data: mmap.mmap, keep_vocabulary: bool) -> None:
        self._file = file
        self._data = data
        self._keep_vocabulary = keep_vocabulary
        self._at = 0
        self._reading = "the counts"  # for messages

    def header(self) -> GgufHeader:
        magic, version = self._data[:4], self._unpack("4xI")
        if magic != b"GGUF":
            raise WeightsError(f"{self._file}: not a GGUF file: it begins with {magic!r}, not b'GGUF'.", FETCH_AGAIN)
        if version not in (2, 3):
            raise WeightsError(
                f"{self._file}: GGUF version {version} (or a big-endian file) is not implemented, only 2 and 3.",
                "Convert the model again with a current converter.",
            )
        num_tensors = self._count("tensors", _SHORTEST_TENSOR_BYTES)
        num_keys = self._count("metadata keys", _SHORTEST_KEY_BYTES)
        metadata: dict[str, Any] = {}
        for i in range(num_keys):
            self._reading = f"metadata key {i + 1} of {num_keys}"
            key = self._string(most_bytes=_LONGEST_NAME_BYTES)
            self._reading = f"the metadata key {key}"
            if key in metadata:
                raise BrokenHeader(f"{self._reading} is listed twice")
            metadata[key] = self._value(self._unpack("I"))
        entries = []
        for i in range(num_tensors):
            self._reading = f"tensor {i + 1} of {num_tensors}"
            entries.append(self._tensor())
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise BrokenHeader(f"general.alignment is {alignment!r}; a whole number of at least 1 was expected")
        start = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, self._locate(entries, start))

    def _count(self, what: str, least_bytes: int) -> int:
        """Read the number of `what` that follow; raises BrokenHeader if that many of `least_bytes` exceed the file."""
        count: int = self._unpack("Q")
        if count * least_bytes > len(self._data):
            raise BrokenHeader(f"the header says {count} {what}, but the file has only {len(self._data)} bytes")
        return count

    def _unpack(self, code: str) -> Any:
        start, self._at = self._at, self._at + self._checked(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._data, start)[0]

    def _string(self, errors: str = "strict", most_bytes: int = _LONGEST_TEXT_BYTES) -> str:
        length = self._checked(self._unpack("Q"))
        if length > most_bytes:
            raise BrokenHeader(f"{self._reading} has a text of {length} bytes; at most {most_bytes} were expected")
        start, self._at = self._at, self._at + length
        try:
            return self._data[start : self._at].decode("utf-8", errors)
        except UnicodeDecodeError:
            raise BrokenHeader(f"{self._reading} has a text that is not UTF-8, at byte {start}") from None

    def _checked(self, length: int) -> int:
        """The length, if that many bytes are left; call it before a length from the file sizes a buffer or a loop."""
        if length > len(self._data) - self._at:
            raise BrokenHeader(
                f"the header is cut off: {self._reading} needs {length} bytes from byte {self._at} on, but the file "
                f"has {len(self._data)}"
            )
        return length

    def _not_implemented(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self._file}: {self._reading} has {what}, which is not implemented.",
            "Fetch the file again if it may be damaged; else convert the model with a current converter.",
        )

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._unpack("I"), self._unpack("Q"))
        if kind not in _SCALARS:
            raise self._not_implemented(f"the value type {kind}")
        value = self._unpack(_SCALARS[kind])
        return _shortest(value) if kind == _FLOAT else value

    def _array(self, kind: int, count: int) -> list[Any] | None:
        """Read an array; None for the vocabulary (strings, or more than _LONGEST_ARRAY values) unless it is kept."""
        if kind == _STRING and self._keep_vocabulary:
            return [self._string("surrogateescape") for _ in range(self._checked(count))]
        if kind == _STRING:
            for _ in range(self._checked(count)):
                length = self._checked(self._unpack("Q"))
                self._at += length
            return None
        if kind not in _SCALARS:
            raise self._not_implemented(f"an array of the value type {kind}")
        start, self._at = self._at, self._at + self._checked(count * struct.calcsize("<" + _SCALARS[kind]))
        if count > _LONGEST_ARRAY and not self._keep_vocabulary:
            return None
        values = list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, start))
        return [_shortest(value) for value in values] if kind == _FLOAT and count <= _LONGEST_ARRAY else values

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape (outermost dimension first), type id, and offset from the start of the data."""
        name, num_dims = self._string(most_bytes=_LONGEST_NAME_BYTES), self._unpack("I")
        self._reading = f"the tensor {name}"
        if not 1 <= num_dims <= 4:
            raise BrokenHeader(f"the tensor {name} has {num_dims} dimensions; 1 to 4 were expected")
        shape = tuple(self._unpack("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._unpack("I"), self._unpack("Q")

    def _locate(self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        known = blocks()
        for name, shape, type_id, offset in entries:
            kind = _TYPES.get(type_id, f"type {type_id}")
            if kind not in known:
                raise WeightsError(
                    f"{self._file}: the tensor {name} is stored as {kind}, which is not implemented.",
                    f"Use a GGUF file whose tensors are {', '.join(known)}.",
                )
            elems, block_bytes = known[kind]
            if shape[-1] % elems:
                raise BrokenHeader(
                    f"the tensor {name} is {kind} {list(shape)}; rows of whole blocks of {elems} were expected"
                )
            if name in tensors:
                raise BrokenHeader(f"the tensor {name} is listed twice")
            nbytes = prod(shape) // elems * block_bytes
            tensors[name] = TensorInfo(kind, shape, self._file, start + offset, nbytes, name=name)
        self._refuse_overlaps(tensors)
        return tensors

    def _refuse_overlaps(self, tensors: dict[str, TensorInfo]) -> None:
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset < end:
                raise BrokenHeader(
                    f"the tensor {name} begins at byte {tensor.offset}, within {before}, which ends at byte {end}"
                )
            end, before = tensor.offset + tensor.nbytes, name
        if end > len(self._data):
            raise WeightsError(
                f"{self._file}: the header describes {end} bytes ({before} is the last tensor), but the file has "
                f"{len(self._data)}.",
                FETCH_AGAIN,
            )


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-06, not 9.999999974752427e-07, as in the original config."""
    packed = struct.pack("<f", value)
    decimals = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((d for d in decimals if struct.pack("<f", d) == packed), value)
