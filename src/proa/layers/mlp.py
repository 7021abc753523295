"""A dense gated MLP as the FFN of a layer."""

from __future__ import annotations

from torch import Tensor

from proa.models import spec
from proa.ops.table import Norm, Ops, Parameters


class Mlp:
    def __init__(self, s: spec.Mlp, ops: Ops) -> None:
        self._mlp, self._add_norm = ops.maps.mlp(s.hidden, s.width, s.bias, s.gating), ops.add_norm

    def __call__(self, x: Tensor, y: Tensor, norm: Norm, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x + y [T, hidden] and mlp(norm(x + y)); padding rows are computed too."""
        x, normed = self._add_norm(x, y, norm.weight, norm.eps, norm.offset)
        return x, self._mlp(normed)

    def parameters(self) -> Parameters:
        return self._mlp.parameters()
