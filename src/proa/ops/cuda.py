"""The ops on an NVIDIA GPU: bfloat16 activations, kernels in Triton, cuBLAS for many rows. They launch on the current
stream and never synchronise, so that a CUDA graph can capture them. Never: kernels, residency of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from proa.models.spec import SILU, Gating
from proa.ops.caches import KvPages, RecurrentState
from proa.ops.choose import composed_choose
from proa.ops.cuda_attention import CudaAttention
from proa.ops.cuda_latent import CudaLatentAttention, CudaLatentMaps
from proa.ops.cuda_linear import CudaLinear, PlainMatrix, router_rows
from proa.ops.gated import ACTIVATIONS
from proa.ops.gpu_traits import GpuTraits
from proa.ops.residency import Located, Residency
from proa.ops.sizes import argmax_keys, delta_chunk_floats
from proa.ops.staging import Staging
from proa.ops.table import (
    Angles,
    AttentionBatch,
    Chosen,
    DeltaInputs,
    DeltaWeights,
    LinearMap,
    NewExperts,
    Norm,
    Ops,
    Parameters,
    QkNorm,
    RouterRule,
    alone,
)
from proa.ops.triton import argmax, choose, delta, delta_chunks, route
from proa.ops.triton import heads as rotations
from proa.ops.triton import norm as norms
from proa.ops.triton.gated import gated
from proa.ops.triton.locate import locate


class CudaOps:
    """Implements the functions of ops/table.py."""

    def __init__(
        self, device: torch.device, new_experts: NewExperts, staging: Staging, traits: GpuTraits,
        attention: CudaAttention, latent: CudaLatentAttention, least_rows: int = 1,
    ) -> None:  # fmt: skip
        """traits: of the device; on the meta device, of the GPU that the kernels are compiled for. least_rows, up to
        LINEAR_ROWS: a launch with fewer rows uses the kernels, tiles and splits of so many, so that a row's bits do not
        depend on the number of rows up to there."""
        self._maps, self._attention = CudaMaps(device, new_experts, staging, latent, least_rows), attention
        self._least_rows = least_rows
        self._composed_choose = composed_choose(self.rms_norm, self.add_norm, self.route)
        self._choice_space = choose.choice_space(device)
        self._latent = latent
        self._chunk_shape = delta_chunks.shape_for(traits.capability, traits.shared_bytes)

    def table(self) -> Ops:
        return Ops(
            maps=self._maps,
            join=alone,
            gather=alone,
            new_block=lambda: None,
            rms_norm=self.rms_norm,
            add=self.add,
            scale=torch.mul,
            add_norm=self.add_norm,
            rotate_store=self.rotate_store,
            choose=self.choose,
            argmax=self.argmax,
            attention=self._attention,
            gate=self.gate,
            gated_delta=self.gated_delta,
            latent_store=self._latent.store,
        )

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norms.rms_norm(x, norm, out)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def add_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norms.add_rms_norm(x, y, norm, out)
        return x, out

    def rotate_store(
        self, q: Tensor, kv: Tensor, norm: QkNorm | None, angles: Angles, cache: KvPages, slots: Tensor
    ) -> Tensor:
        kv_heads, per_head = cache.keys.shape[2], norm
        if norm is not None and len(norm.q) != q.shape[2]:  # a norm over all heads together
            per_head = None
            for part, weight in ((q, norm.q), (kv[:, :kv_heads], norm.k)):
                rows = part.flatten(1)
                norms.rms_norm(rows, Norm(weight, norm.eps, norm.offset), rows)
        together = q.stride(1) == q.shape[2]
        out = q if together else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rotations.rotate_store(q, kv, per_head, angles, cache, slots, out)
        return out

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        rotations.gate(x, gate)
        return x

    def gated_delta(
        self, x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, batch: AttentionBatch
    ) -> Tensor:
        """`batch` must have device tensors."""
        at = batch.on_device
        rows, heads, dim = len(x.q), len(weights.a_log), x.v.shape[3]
        mixed, seen = (torch.empty(rows, n, device=x.q.device) for n in (len(weights.conv), heads * dim))
        shape, chunks = self._chunk_shape, None
        if shape is not None and delta.takes_chunks(rows, x.q.shape[2], one_each=at.rows_each == 1):
            space = torch.empty(delta_chunk_floats(rows, heads), device=x.q.device)
            chunks = delta_chunks.Chunks(shape, space)
        out = torch.empty(rows, heads * dim, dtype=x.q.dtype, device=x.q.device)
        buffers = delta.DeltaSpace(mixed, seen.view(rows, heads, dim), chunks)
        delta.gated_delta(x, weights, state, at, batch.slots, buffers, out, self._least_rows)
        return out

    def route(self, logits: Tensor, slots: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        ids = torch.empty(len(logits), rule.top_k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(len(logits), rule.top_k, device=logits.device)
        route.route(logits, slots, rule, ids, weights)
        return ids, weights

    def choose(
        self, x: Tensor, y: Tensor | None, norm: Norm, router: LinearMap, slots: Tensor, rule: RouterRule,
        residency: Residency | None,
    ) -> tuple[Tensor, Tensor, Chosen]:  # fmt: skip
        few = max(len(x), self._least_rows) <= choose.MOST_ROWS and x.shape[1] <= choose.MOST_COLUMNS
        rows = router_rows(router)
        if residency is None or rows is None or not few or y is None:
            return self._composed_choose(x, y, norm, router, slots, rule, residency)
        fetched = residency.in_place is not None and len(x) > 1
        # a program of the fused kernel sees one row; single-token experts can be identified only across all rows
        here = replace(residency, counts=None, bell=None) if fetched else residency
        out = _new_choice(x, rule.top_k, here.bell is not None)
        choose.choose(x, y, norm, rows, slots, rule, here, self._choice_space, out)
        if fetched:
            locate(out.at.ids, residency, out.at)
        return out.total, out.normed, Chosen(out.at.ids, out.weights, out.at)

    def argmax(self, logits: Tensor) -> Tensor:
        keys = argmax_keys(*logits.shape)
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        argmax.argmax(logits, torch.empty(keys, dtype=torch.int64, device=logits.device), out)
        return out


def _new_choice(x: Tensor, top_k: int, handed_over: bool) -> choose.ChooseOutputs:
    def pairs(dtype: torch.dtype) -> Tensor:
        return torch.empty(len(x), top_k, dtype=dtype, device=x.device)

    at = Located(pairs(torch.int32), pairs(torch.int64), pairs(torch.int64), pairs(torch.int32), handed_over)
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return choose.ChooseOutputs(total, normed, pairs(torch.float32), at)


class CudaMlp:
    def __init__(
        self, hidden: int, width: int, bias: bool, gating: Gating, device: torch.device, staging: Staging,
        least_rows: int,
    ) -> None:  # fmt: skip
        self._gating = gating
        self._gate_up = CudaLinear({"gate": width, "up": width}, hidden, bias, device, staging, least_rows=least_rows)
        self._down = CudaLinear({"down": hidden}, width, bias, device, staging, least_rows=least_rows)

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self._gate_up(x)
        h = torch.empty(len(x), gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
        gated(gate_up, h, ACTIVATIONS[self._gating.kind], self._gating.limit)
        return self._down(h)

    def parameters(self) -> Parameters:
        yield from self._gate_up.parameters()
        yield from self._down.parameters()


class CudaEmbedding:
    """An embedding of bfloat16 rows, whatever the checkpoint's type: rows are looked up."""

    def __init__(self, vocab: int, hidden: int, device: torch.device, least_rows: int) -> None:
        self._table = PlainMatrix(torch.empty(vocab, hidden, dtype=torch.bfloat16, device=device), least_rows)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._table.weight.index_select(0, tokens)

    def logits(self, x: Tensor) -> Tensor:
        return self._table.product(x, None, torch.float32)

    def parameters(self) -> Parameters:
        yield "weight", self._table.weight


class CudaMaps:
    """Makes layers on one GPU; their weights are loaded through the staging memory. least_rows: see CudaOps."""

    def __init__(
        self, device: torch.device, new_experts: NewExperts, staging: Staging, latent: CudaLatentAttention,
        least_rows: int = 1,
    ) -> None:  # fmt: skip
        self._device, self._staging, self._latent, self._least_rows = device, staging, latent, least_rows
        self.experts = new_experts

    def linear(self, outs: Mapping[str, int], inputs: int, bias: bool) -> CudaLinear:
        return self._linear(outs, inputs, bias, torch.bfloat16)

    def router(self, experts: int, hidden: int, bias: bool = False) -> CudaLinear:
        return self._linear({"router": experts}, hidden, bias, torch.float32)

    def head(self, vocab: int, hidden: int) -> CudaLinear:
        return self._linear({"head": vocab}, hidden, False, torch.float32)

    def _linear(self, outs: Mapping[str, int], inputs: int, bias: bool, out: torch.dtype) -> CudaLinear:
        return CudaLinear(outs, inputs, bias, self._device, self._staging, out, self._least_rows)

    def mlp(self, hidden: int, width: int, bias: bool, gating: Gating = SILU) -> CudaMlp:
        return CudaMlp(hidden, width, bias, gating, self._device, self._staging, self._least_rows)

    def latent(self, heads: int, keys: int, values: int, rank: int) -> CudaLatentMaps:
        return CudaLatentMaps(heads, keys, values, rank, self._device, self._latent)

    def embedding(self, vocab: int, hidden: int, tied: bool) -> CudaEmbedding:
        return CudaEmbedding(vocab, hidden, self._device, self._least_rows)

    def vector(self, width: int) -> Tensor:
        return torch.empty(width, dtype=torch.bfloat16, device=self._device)

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device)
