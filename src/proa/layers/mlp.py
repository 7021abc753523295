"""A dense MLP as the FFN of a layer."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from proa.layers.norm import RmsNorm
from proa.models import spec
from proa.ops.table import Ops, Parameters, Unsummed


class Mlp:
    def __init__(self, s: spec.Mlp, ops: Ops) -> None:
        self._mlp = ops.maps.mlp(s.hidden, s.width, s.bias, s.gating)

    def parts(
        self, x: Tensor, y: Tensor | Unsummed | None, norm: RmsNorm, slots: Tensor
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """Returns x + y [T, hidden] (y None: x) and mlp(norm(x + y)); padding rows are computed too. Yields nothing."""
        yield from ()
        x, normed = norm.of_sum(x, y)
        return x, self._mlp(normed)

    def parameters(self) -> Parameters:
        return self._mlp.parameters()
