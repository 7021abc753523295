"""RMSNorm over the hidden state, with its weight."""

from __future__ import annotations

from torch import Tensor

from proa.models import spec
from proa.ops.table import Norm, Ops, Parameters, Unsummed


class RmsNorm:
    """RMSNorm over the hidden state of a model."""

    def __init__(self, model: spec.Model, ops: Ops) -> None:
        self._rms_norm, self._add_norm = ops.rms_norm, ops.add_norm
        self.norm = Norm(ops.maps.vector(model.hidden), model.norm_eps, model.norm_offset)  # for ops that fuse it

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.norm)

    def of_sum(self, x: Tensor, y: Tensor | Unsummed | None) -> tuple[Tensor, Tensor]:
        """Returns x + y and its norm; y None: x and its norm."""
        if y is None:
            return x, self(x)
        if isinstance(y, Tensor):
            return self._add_norm(x, y, self.norm)
        return y.add_norm(x, self.norm)

    def parameters(self) -> Parameters:
        yield "weight", self.norm.weight
