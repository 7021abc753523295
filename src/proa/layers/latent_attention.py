"""Multi-head latent attention: project, rotate and store, attend over latents. Never: pages, masks, batching."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.layers.rope import score_factor
from proa.layers.step import Step
from proa.models import spec
from proa.ops.caches import LatentPages
from proa.ops.table import Angles, Norm, Ops, Parameters


class LatentAttention:
    def __init__(self, s: spec.LatentAttention, model: spec.Model, ops: Ops) -> None:
        self.spec, self.ops, offset = s, ops, model.norm_offset
        self.scale = (s.key_dim + s.rope.dim) ** -0.5 * score_factor(s.rope)
        maps, kv = ops.maps, {"kv_a": s.rank + s.rope.dim}
        self.q_norm = None if s.q_rank is None else Norm(maps.vector(s.q_rank), s.norm_eps, offset)
        # All projections of the hidden state in one matrix.
        self.a = maps.linear(({"q": s.q_rows} if s.q_rank is None else {"q_a": s.q_rank}) | kv, s.hidden, False)
        self.q_b = None if s.q_rank is None else maps.linear({"q_b": s.q_rows}, s.q_rank, False)
        self.kv_norm = Norm(maps.vector(s.rank), s.norm_eps, offset)
        self.kv_b = maps.latent(s.heads, s.key_dim, s.value_dim, s.rank)
        self.o = maps.linear({"o": s.hidden}, s.heads * s.value_dim, False)

    def __call__(self, x: Tensor, step: Step, caches: tuple[LatentPages]) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        (cache,), s, ops = caches, self.spec, self.ops
        q, kv = torch.split(self.a(x), [s.q_rank or s.q_rows, s.rank + s.rope.dim], 1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b(ops.rms_norm(q, self.q_norm))
        angles = Angles(*step.angles[s.rope], s.rope.interleaved)
        q = q.view(len(x), s.heads, s.key_dim + s.rope.dim)
        q = ops.latent_store(q, kv, self.kv_norm, angles, cache, step.batch.slots)
        return self.o(self.kv_b.attend(q, cache, step.batch, self.scale))

    def parameters(self) -> Parameters:
        yield from self.a.parameters()
        if self.q_norm is not None and self.q_b is not None:
            yield "q_a_norm.weight", self.q_norm.weight
            yield from self.q_b.parameters()
        yield "kv_a_norm.weight", self.kv_norm.weight
        yield from self.kv_b.parameters()
        yield from self.o.parameters()
