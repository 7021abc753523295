"""Parameters as the checkpoint defines them, in float32, read apart from the loader and the packed weights that are
checked. Never: the native library's readers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proa.check.dequantise import matrix, plain_rows
from proa.models.names import Declared
from proa.weights.checkpoint import Checkpoint
from proa.weights.index import TensorInfo
from proa.weights.source import Source
from proa.weights.sources import resolve
from proa.weights.torch_bin import open_bin


class Truth:
    """Reads one parameter at a time. Of a quantised tensor the last matrix is kept, since gate and up may share it."""

    def __init__(self, checkpoint: Checkpoint, declared: Declared) -> None:
        """Raises WeightsError if a parameter has no source."""
        self._tensors, self._sources = checkpoint.tensors, resolve(declared, checkpoint.tensors)
        self._shapes = dict(declared.spec.params())
        self._last: tuple[tuple[str, int], Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """The parameter as float32, in its own shape. Raises WeightsError if its file ends too early."""
        parts = [self._part(source) for source in self._sources.of(name)]
        return torch.cat(parts).reshape(self._shapes[name])

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count) of a parameter that is one tensor's rows, such as the embedding."""
        (source,) = self._sources.of(name)
        return self._part(source.part(range(first, first + count), None))

    def _part(self, of: Source) -> Tensor:
        span = (of.rows - 1) * of.row_step + 1
        stored = self._rows(of.tensor, of.first_row, span)[:: of.row_step]
        last = of.first_col + (of.cols - 1) * of.col_step
        values = stored[:, of.first_col : last + 1 : of.col_step]
        match of.changed:
            case "x + 1":
                values = values - 1
            case "-exp(x)":
                values = (-values).log()
        return values.T if of.transposed else values

    def _rows(self, tensor: str, first: int, count: int) -> Tensor:
        info = self._tensors[tensor]
        if info.quantised is not None:
            return self._quantised_rows(tensor, info, first, count)
        if info.file.suffix == ".bin":
            stored = open_bin(info.file)[tensor]
            return stored.reshape(-1, stored.shape[-1] if stored.dim() else 1)[first : first + count].float()
        return plain_rows(info, first, count)

    def _quantised_rows(self, tensor: str, info: TensorInfo, first: int, count: int) -> Tensor:
        height, found = info.shape[-2], []
        for number in range(first // height, (first + count - 1) // height + 1):
            begin, end = max(first - number * height, 0), min(first + count - number * height, height)
            found.append(self._matrix(tensor, info, number)[begin:end])
        return torch.cat(found)

    def _matrix(self, tensor: str, info: TensorInfo, number: int) -> Tensor:
        key = tensor, number
        if self._last is None or self._last[0] != key:
            assert info.quantised is not None
            self._last = key, matrix(info, info.quantised, number)
        return self._last[1]
