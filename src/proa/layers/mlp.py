"""The same gated MLP for every token."""

from __future__ import annotations

from torch import Tensor

from proa.models import spec
from proa.ops.table import Ops, Parameters


class Mlp:
    def __init__(self, s: spec.Mlp, ops: Ops) -> None:
        self._mlp = ops.maps.mlp(s.hidden, s.width, s.bias)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]; rows of padding are computed like others."""
        return self._mlp(x)

    def parameters(self) -> Parameters:
        return self._mlp.parameters()
