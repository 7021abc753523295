"""Grouped-query attention: project, normalise, rotate, call the op. Never: pages, masks, batching."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.layers.norm import RmsNorm
from proa.layers.parameters import prefixed
from proa.layers.step import Step
from proa.models import spec
from proa.ops.table import KvPages, Ops, Parameters


class Attention:
    def __init__(self, s: spec.Attention, eps: float, ops: Ops) -> None:
        self.spec, self.ops = s, ops
        self.scale = s.head_dim**-0.5
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.qkv = ops.maps.linear({"q": q, "k": kv, "v": kv}, s.hidden, s.qkv_bias)
        self.o = ops.maps.linear({"o": s.hidden}, q, s.o_bias)
        widths = {"none": (), "head": (s.head_dim, s.head_dim), "full": (q, kv)}[s.qk_norm]
        self.norms = tuple(RmsNorm(width, eps, ops) for width in widths)

    def __call__(self, x: Tensor, step: Step, cache: KvPages) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        s, ops = self.spec, self.ops
        heads = self.qkv(x).view(len(x), -1, s.head_dim)
        q, k, v = torch.split(heads, [s.heads, s.kv_heads, s.kv_heads], 1)
        if self.norms:
            q, k = (n(t.reshape(len(x), -1, n.width)).view_as(t) for n, t in zip(self.norms, (q, k), strict=True))
        cos, sin = step.angles[s.rope]
        q, k = (ops.rotary(t, cos, sin, s.rope.interleaved) for t in (q, k))
        ops.write_kv(k, v, cache, step.batch.slots)
        seen = ops.attention(q, cache, step.batch, self.scale, s.window)
        return self.o(seen.flatten(1))

    def parameters(self) -> Parameters:
        yield from self.qkv.parameters()
        yield from self.o.parameters()
        for name, norm in zip(("q_norm", "k_norm"), self.norms, strict=False):
            yield from prefixed(name, norm.parameters())
