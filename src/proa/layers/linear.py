"""A linear map, or several that read the same input and run as one. Never: formats' maths, checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from proa.ops.table import Ops

Parameters = Iterator[tuple[str, Tensor]]


class Linear:
    """x [T, in] -> [T, sum of outs]. `outs` names the parts, in order; each part's rows are a view of one matrix."""

    def __init__(self, ops: Ops, inputs: int, outs: Mapping[str, int], bias: bool, dtype: torch.dtype) -> None:
        self._linear = ops.linear
        self.outs = dict(outs)
        self.weight = torch.empty(sum(outs.values()), inputs, dtype=dtype)
        self.bias = torch.empty(sum(outs.values()), dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)

    def parameters(self) -> Parameters:
        sizes = list(self.outs.values())
        for name, part in zip(self.outs, torch.split(self.weight, sizes), strict=True):
            yield f"{name}.weight", part
        if self.bias is not None:
            for name, vector in zip(self.outs, torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", vector


def prefixed(prefix: str, parameters: Parameters) -> Parameters:
    return ((f"{prefix}.{name}", tensor) for name, tensor in parameters)
