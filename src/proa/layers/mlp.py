"""The gated MLP, dense or shared."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.layers.linear import Linear, Parameters
from proa.models import spec
from proa.ops.table import Ops


class Mlp:
    def __init__(self, s: spec.Mlp, ops: Ops, dtype: torch.dtype) -> None:
        self._silu_mul = ops.silu_mul
        self.gate_up = Linear(ops, s.hidden, {"gate": s.width, "up": s.width}, s.bias, dtype)
        self.down = Linear(ops, s.width, {"down": s.hidden}, s.bias, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._silu_mul(self.gate_up(x)))

    def parameters(self) -> Parameters:
        yield from self.gate_up.parameters()
        yield from self.down.parameters()
