"""Router, shared expert, routed experts. Never: knowing where experts live."""

from __future__ import annotations

from torch import Tensor

from proa.layers.parameters import prefixed
from proa.models import spec
from proa.ops.table import Ops, Parameters


class Moe:
    def __init__(self, s: spec.Moe, ops: Ops) -> None:
        self.spec, self._ops = s, ops
        maps = ops.maps
        self.router = maps.linear({"router": s.experts}, s.hidden, False)
        self.experts = maps.experts(s.experts, s.hidden, s.width)
        self.shared = maps.mlp(s.shared.hidden, s.shared.width, s.shared.bias) if s.shared else None
        self.shared_gate = maps.linear({"shared_gate": 1}, s.hidden, False) if s.shared_gate else None

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]; rows of padding, of slot -1, go to no routed expert."""
        ids, weights = self._ops.route(self.router(x), slots, self.spec.top_k, self.spec.router.renormalise)
        routed = self.experts.start(x, ids, weights)
        shared = self.shared(x) if self.shared else None
        gate = self.shared_gate(x) if self.shared_gate else None
        return routed.finish(shared, gate)

    def parameters(self) -> Parameters:
        yield from self.router.parameters()
        yield from prefixed("experts", self.experts.parameters())
        if self.shared is not None:
            yield from prefixed("shared", self.shared.parameters())
        if self.shared_gate is not None:
            yield from self.shared_gate.parameters()
