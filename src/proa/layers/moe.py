"""A mixture of experts as the FFN of a layer: router, shared and routed experts. Never: where experts are stored."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from proa.layers.norm import RmsNorm
from proa.layers.parameters import prefixed
from proa.models import spec
from proa.ops.table import NextRouter, Norm, Ops, Parameters, RouterRule, Unsummed


class Moe:
    def __init__(self, s: spec.Moe, ops: Ops, block: int) -> None:
        """block: its number in the model."""
        self._ops, maps = ops, ops.maps
        self.router = maps.router(s.scored, s.hidden, s.router.linear_bias)
        self._correction = maps.numbers(s.scored) if s.router.correction else None
        self._rule = RouterRule(s.top_k, s.router, self._correction)
        self.experts = maps.experts(s.experts, s.hidden, s.width, s.bias, s.gating, block=block)
        shared = s.shared
        self.shared = maps.mlp(shared.hidden, shared.width, shared.bias, shared.gating) if shared else None
        self.shared_gate = maps.linear({"shared_gate": 1}, s.hidden, False) if s.shared_gate else None
        self._next: tuple[Moe, RmsNorm] | None = None

    def is_followed_by(self, following: Moe, norm: RmsNorm) -> None:
        """Set the model's next MoE layer, whose choice this layer predicts; norm: that layer's input norm."""
        self._next = following, norm

    def parts(
        self, x: Tensor, y: Tensor | Unsummed | None, norm: RmsNorm, slots: Tensor
    ) -> Generator[None, None, tuple[Tensor, Tensor | Unsummed]]:
        """Returns x + y [T, hidden] (y None: x) and the MoE output for norm(x + y); rows of slot -1 go to no routed
        expert. Yields between groups of experts."""
        if y is not None and not isinstance(y, Tensor):
            x, y = y.add(x), None
        x, normed, chosen = self._ops.choose(x, y, norm.norm, self.router, slots, self._rule, self.experts.residency)
        routed = self.experts.start(normed, chosen)
        yield from routed.groups()
        shared = self.shared(normed) if self.shared else None
        gate = self.shared_gate(normed) if self.shared_gate else None
        if self._next is not None:
            following, norm_there = self._next
            following.foresee(x, norm_there.norm, slots)
        return x, routed.finish(shared, gate)

    def foresee(self, x: Tensor, norm: Norm, slots: Tensor) -> None:
        """Predict this layer's experts from the residual stream x of an earlier layer, to prefetch them."""
        self.experts.foresee(x, slots, NextRouter(norm, self.router, self._rule))

    def parameters(self) -> Parameters:
        yield from self.router.parameters()
        if self._correction is not None:
            yield "router.correction", self._correction
        yield from prefixed("experts", self.experts.parameters())
        if self.shared is not None:
            yield from prefixed("shared", self.shared.parameters())
        if self.shared_gate is not None:
            yield from self.shared_gate.parameters()
