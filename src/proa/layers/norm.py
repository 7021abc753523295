"""RMSNorm with its weight."""

from __future__ import annotations

from torch import Tensor

from proa.ops.table import Norm, Ops, Parameters


class RmsNorm:
    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        self._rms_norm, self._add_norm = ops.rms_norm, ops.add_norm
        self.width = width
        self.eps = eps
        self.weight = ops.maps.vector(width)

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y and its norm; y None: nothing is added."""
        return (x, self(x)) if y is None else self._add_norm(x, y, self.weight, self.eps)

    @property
    def norm(self) -> Norm:
        """For ops that have it inside."""
        return Norm(self.weight, self.eps)

    def parameters(self) -> Parameters:
        yield "weight", self.weight
