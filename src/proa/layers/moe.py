"""Router, shared expert, routed experts. Never: knowing where experts live."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.layers.linear import Linear, Parameters, prefixed
from proa.layers.mlp import Mlp
from proa.models import spec
from proa.ops.table import Ops


class Experts:
    """All experts of one layer, stacked. gate_up [E, 2I, H] (gate first), down [E, H, I]."""

    def __init__(self, s: spec.Moe, ops: Ops, dtype: torch.dtype) -> None:
        self._moe_experts = ops.moe_experts
        self.gate_up = torch.empty(s.experts, 2 * s.width, s.hidden, dtype=dtype)
        self.down = torch.empty(s.experts, s.hidden, s.width, dtype=dtype)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._moe_experts(x, ids, weights, self.gate_up, self.down)

    def parameters(self) -> Parameters:
        width = self.down.shape[2]
        for e, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield f"{e}.gate.weight", gate_up[:width]
            yield f"{e}.up.weight", gate_up[width:]
            yield f"{e}.down.weight", down


class Moe:
    def __init__(self, s: spec.Moe, ops: Ops, dtype: torch.dtype) -> None:
        self.spec, self._route = s, ops.route
        self.router = Linear(ops, s.hidden, {"router": s.experts}, False, dtype)
        self.experts = Experts(s, ops, dtype)
        self.shared = Mlp(s.shared, ops, dtype) if s.shared else None
        self.shared_gate = Linear(ops, s.hidden, {"shared_gate": 1}, False, dtype) if s.shared_gate else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ids, weights = self._route(self.router(x), self.spec.top_k, self.spec.router.renormalise)
        routed = self.experts(x, ids, weights)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return routed + shared

    def parameters(self) -> Parameters:
        yield from self.router.parameters()
        yield from prefixed("experts", self.experts.parameters())
        if self.shared is not None:
            yield from prefixed("shared", self.shared.parameters())
        if self.shared_gate is not None:
            yield from self.shared_gate.parameters()
