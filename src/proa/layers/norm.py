"""RMSNorm with its weight."""

from __future__ import annotations

from torch import Tensor

from proa.ops.table import Ops, Parameters


class RmsNorm:
    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        self._rms_norm = ops.rms_norm
        self.width = width
        self.eps = eps
        self.weight = ops.maps.vector(width)

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def parameters(self) -> Parameters:
        yield "weight", self.weight
