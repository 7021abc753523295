"""RMSNorm with its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.layers.linear import Parameters
from proa.ops.table import Ops


class RmsNorm:
    def __init__(self, width: int, eps: float, ops: Ops, dtype: torch.dtype) -> None:
        self._rms_norm = ops.rms_norm
        self.width = width
        self.eps = eps
        self.weight = torch.empty(width, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def parameters(self) -> Parameters:
        yield "weight", self.weight
