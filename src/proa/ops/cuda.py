"""The ops on an NVIDIA GPU: bfloat16 activations, kernels in Triton, cuBLAS for many rows. They compute when called, on
the current stream, without waiting for anything: a CUDA graph can hold them. Never: kernels, residency of experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from proa.ops.choose import in_steps
from proa.ops.cuda_latent import CudaLatentAttention, CudaLatentMaps, shared_bytes
from proa.ops.cuda_linear import CudaLinear, PlainMatrix
from proa.ops.residency import Located, Residency
from proa.ops.staging import Staging
from proa.ops.table import (
    Angles,
    AttentionBatch,
    Chosen,
    DeltaInputs,
    DeltaWeights,
    KvPages,
    LinearMap,
    NewExperts,
    Norm,
    Ops,
    Parameters,
    QkNorm,
    RecurrentState,
    RouterRule,
)
from proa.ops.triton import attention, best, choose, delta, route
from proa.ops.triton import heads as rotations
from proa.ops.triton import norm as norms
from proa.ops.triton.gated import silu_mul


class CudaOps:
    """Implements the functions of ops/table.py."""

    def __init__(self, device: torch.device, new_experts: NewExperts, staging: Staging) -> None:
        self._maps = CudaMaps(device, new_experts, staging)
        self._in_steps = in_steps(self.add_norm, self.route)
        self._choice_space = choose.choice_space(device)
        self._processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._latent = CudaLatentAttention(self._processors, shared_bytes(device))

    def table(self) -> Ops:
        return Ops(
            maps=self._maps,
            new_block=lambda: None,
            rms_norm=self.rms_norm,
            add=self.add,
            add_norm=self.add_norm,
            rotate_store=self.rotate_store,
            choose=self.choose,
            best=self.best,
            attention=self.attention,
            gate=self.gate,
            gated_delta=self.gated_delta,
            latent_store=self._latent.store,
            latent_attention=self._latent.attend,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norms.rms_norm(x, weight, eps, out, offset)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        norms.add_rms_norm(x, y, weight, eps, out, offset)
        return x, out

    def rotate_store(
        self, q: Tensor, kv: Tensor, norm: QkNorm | None, angles: Angles, cache: KvPages, slots: Tensor
    ) -> Tensor:
        kv_heads, per_head = cache.keys.shape[2], norm
        if norm is not None and len(norm.q) != q.shape[2]:  # over all heads together
            per_head = None
            for part, weight in ((q, norm.q), (kv[:, :kv_heads], norm.k)):
                rows = part.flatten(1)
                norms.rms_norm(rows, weight, norm.eps, rows, norm.offset)
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
        """`batch` says where on the device it stands: DeviceBatch."""
        if batch.device is None:
            raise ValueError("the delta rule on a GPU reads its batch from the device")
        rows, heads, dim = len(x.q), len(weights.a_log), x.v.shape[3]
        mixed, seen = (torch.empty(rows, n, device=x.q.device) for n in (len(weights.conv), heads * dim))
        out = torch.empty(rows, heads * dim, dtype=x.q.dtype, device=x.q.device)
        delta.gated_delta(x, weights, state, batch.device, batch.slots, mixed, seen.view(rows, heads, dim), out)
        return out

    def route(self, logits: Tensor, slots: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        ids = torch.empty(len(logits), rule.top_k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(len(logits), rule.top_k, device=logits.device)
        route.route(logits, slots, rule, ids, weights)
        return ids, weights

    def choose(
        self, x: Tensor, y: Tensor, norm: Norm, router: LinearMap, slots: Tensor, rule: RouterRule,
        residency: Residency | None,
    ) -> tuple[Tensor, Tensor, Chosen]:  # fmt: skip
        few = len(x) <= choose.MOST_ROWS and x.shape[1] <= choose.MOST_COLUMNS
        weight = router.weight if isinstance(router, CudaLinear) and router.bias is None else None
        if residency is None or weight is None or not few:
            return self._in_steps(x, y, norm, router, slots, rule, residency)
        out = _new_choice(x, rule.top_k)
        choose.choose(x, y, norm, weight, slots, rule, residency, self._choice_space, out)
        return out.total, out.normed, Chosen(out.at.ids, out.weights, out.at)

    def best(self, logits: Tensor) -> Tensor:
        keys = best.workspace_keys(*logits.shape)
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        best.best(logits, torch.empty(keys, dtype=torch.int64, device=logits.device), out)
        return out

    def attention(self, q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None) -> Tensor:
        """`batch` says where on the device it stands: DeviceBatch."""
        at = batch.device
        if at is None:
            raise ValueError("attention on a GPU reads its batch from the device")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        softmax = attention.Softmax(scale, window)
        if not at.one_each:
            attention.prefill(q, cache, at.page_table, at.q_starts, at.kv_lens, softmax, out)
            return out
        rows, heads, dim = q.shape
        splits = attention.splits_for(rows, cache.keys.shape[2], self._processors)
        space = torch.empty(attention.workspace_floats(rows, heads, dim, splits), device=q.device)
        attention.decode(q, cache, at.page_table, at.kv_lens, softmax, splits, space, out)
        return out


def _new_choice(x: Tensor, top_k: int) -> choose.Choice:
    def pairs(dtype: torch.dtype) -> Tensor:
        return torch.empty(len(x), top_k, dtype=dtype, device=x.device)

    at = Located(pairs(torch.int32), pairs(torch.int64), pairs(torch.int64), pairs(torch.int32))
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return choose.Choice(total, normed, pairs(torch.float32), at)


class CudaMlp:
    def __init__(self, hidden: int, width: int, bias: bool, device: torch.device, staging: Staging) -> None:
        self._gate_up = CudaLinear({"gate": width, "up": width}, hidden, bias, device, staging)
        self._down = CudaLinear({"down": hidden}, width, bias, device, staging)

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self._gate_up(x)
        h = torch.empty(len(x), gate_up.shape[1] // 2, dtype=x.dtype, device=x.device)
        silu_mul(gate_up, h)
        return self._down(h)

    def parameters(self) -> Parameters:
        yield from self._gate_up.parameters()
        yield from self._down.parameters()


class CudaEmbedding:
    """Rows of bfloat16, whatever the checkpoint has: they are looked up."""

    def __init__(self, vocab: int, hidden: int, device: torch.device) -> None:
        self._table = PlainMatrix(torch.empty(vocab, hidden, dtype=torch.bfloat16, device=device))

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._table.weight.index_select(0, tokens)

    def logits(self, x: Tensor) -> Tensor:
        return self._table.product(x, None, torch.float32)

    def parameters(self) -> Parameters:
        yield "weight", self._table.weight


class CudaMaps:
    """Weights come through the staging."""

    def __init__(self, device: torch.device, new_experts: NewExperts, staging: Staging) -> None:
        self._device, self._staging = device, staging
        self.experts = new_experts

    def linear(self, outs: Mapping[str, int], inputs: int, bias: bool) -> CudaLinear:
        return CudaLinear(outs, inputs, bias, self._device, self._staging)

    def router(self, experts: int, hidden: int) -> CudaLinear:
        return CudaLinear({"router": experts}, hidden, False, self._device, self._staging, out=torch.float32)

    def head(self, vocab: int, hidden: int) -> CudaLinear:
        return CudaLinear({"head": vocab}, hidden, False, self._device, self._staging, out=torch.float32)

    def mlp(self, hidden: int, width: int, bias: bool) -> CudaMlp:
        return CudaMlp(hidden, width, bias, self._device, self._staging)

    def latent(self, heads: int, keys: int, values: int, rank: int) -> CudaLatentMaps:
        return CudaLatentMaps(heads, keys, values, rank, self._device)

    def embedding(self, vocab: int, hidden: int, tied: bool) -> CudaEmbedding:
        return CudaEmbedding(vocab, hidden, self._device)

    def vector(self, width: int) -> Tensor:
        return torch.empty(width, dtype=torch.bfloat16, device=self._device)

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device)
