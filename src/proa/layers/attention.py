"""Grouped-query attention: project, normalise, rotate, call the op. Never: pages, masks, batching."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.layers.step import Step
from proa.models import spec
from proa.ops.caches import KvPages
from proa.ops.table import Angles, Ops, Parameters, QkNorm


class Attention:
    def __init__(self, s: spec.Attention, model: spec.Model, ops: Ops) -> None:
        self.spec, self.ops = s, ops
        self.scale = s.head_dim**-0.5 if s.scale is None else s.scale
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.qkv = ops.maps.linear({"q": s.q_rows, "k": kv, "v": kv}, s.hidden, s.qkv_bias)
        self.o = ops.maps.linear({"o": s.hidden}, q, s.o_bias)
        widths = {"none": None, "head": (s.head_dim, s.head_dim), "full": (q, kv)}[s.qk_norm]
        self.sinks = ops.maps.numbers(s.heads) if s.sinks else None
        eps, offset = model.norm_eps, model.norm_offset
        self.norm = QkNorm(ops.maps.vector(widths[0]), ops.maps.vector(widths[1]), eps, offset) if widths else None

    def __call__(self, x: Tensor, step: Step, caches: tuple[KvPages]) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        (cache,), s, ops = caches, self.spec, self.ops
        qkv = self.qkv(x).view(len(x), -1, s.head_dim)
        q, kv = torch.split(qkv, [s.q_rows // s.head_dim, 2 * s.kv_heads], 1)
        gate = q[:, 1::2] if s.gated else None
        q = q[:, ::2] if s.gated else q
        angles = Angles(*step.angles[s.rope], s.rope.interleaved)
        q = ops.rotate_store(q, kv, self.norm, angles, cache, step.batch.slots)
        seen = ops.attention(q, cache, step.batch, self.scale, s.window, self.sinks)
        seen = seen if gate is None else ops.gate(seen, gate)
        return self.o(seen.flatten(1))

    def parameters(self) -> Parameters:
        yield from self.qkv.parameters()
        yield from self.o.parameters()
        if self.norm:
            yield "q_norm.weight", self.norm.q
            yield "k_norm.weight", self.norm.k
        if self.sinks is not None:
            yield "sinks", self.sinks
