"""Linear attention by the gated delta rule: project, call the op. Never: slots of states, batching."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.layers.step import Step
from proa.models import spec
from proa.ops.caches import RecurrentState
from proa.ops.table import DeltaInputs, DeltaWeights, Ops, Parameters


class GatedDeltaNet:
    def __init__(self, s: spec.GatedDeltaNet, model: spec.Model, ops: Ops) -> None:
        self.spec, self._delta = s, ops.gated_delta
        maps, values = ops.maps, s.value_heads * s.value_dim
        self.qkvz = maps.linear({"qkvz": s.channels + values}, s.hidden, False)
        self.ba = maps.linear({"ba": 2 * s.value_heads}, s.hidden, False)
        self.out = maps.linear({"out": s.hidden}, values, False)
        self.weights = DeltaWeights(
            conv=maps.numbers(s.channels, 1, s.taps),
            a_log=maps.numbers(s.value_heads),
            dt_bias=maps.numbers(s.value_heads),
            norm=maps.vector(s.value_dim),
            eps=model.norm_eps,
        )

    def __call__(self, x: Tensor, step: Step, caches: tuple[RecurrentState]) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        (cache,) = caches
        return self.out(self._delta(self._inputs(x), self.weights, cache, step.batch))

    def _inputs(self, x: Tensor) -> DeltaInputs:
        s = self.spec
        per_group = s.value_heads // s.key_heads
        wide = per_group * s.value_dim
        qkvz = self.qkvz(x).view(len(x), s.key_heads, -1)
        q, k, v, z = torch.split(qkvz, [s.key_dim, s.key_dim, wide, wide], -1)
        b, a = torch.split(self.ba(x).view(len(x), s.key_heads, -1), [per_group, per_group], -1)
        v, z = (t.view(*t.shape[:2], per_group, s.value_dim) for t in (v, z))
        return DeltaInputs(q, k, v, z, b, a)

    def parameters(self) -> Parameters:
        yield from self.qkvz.parameters()
        yield from self.ba.parameters()
        yield "conv.weight", self.weights.conv
        yield "a_log", self.weights.a_log
        yield "dt_bias", self.weights.dt_bias
        yield "norm.weight", self.weights.norm
        yield from self.out.parameters()
