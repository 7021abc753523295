"""The ops on an NVIDIA GPU: bfloat16 activations, kernels in Triton, cuBLAS for many rows. They compute when called, on
the current stream, without waiting for anything: a CUDA graph can hold them. Never: kernels, residency of experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from proa.ops.table import (
    Angles,
    AttentionBatch,
    DeltaInputs,
    DeltaWeights,
    KvPages,
    NewExperts,
    Ops,
    Parameters,
    QkNorm,
    RecurrentState,
)
from proa.ops.triton import attention, best, delta, linear, route
from proa.ops.triton import heads as rotations
from proa.ops.triton import norm as norms


class CudaOps:
    """Implements the functions of ops/table.py."""

    def __init__(self, device: torch.device, new_experts: NewExperts) -> None:
        self._maps = CudaMaps(device, new_experts)
        self._processors: int = torch.cuda.get_device_properties(device).multi_processor_count

    def table(self) -> Ops:
        return Ops(
            maps=self._maps,
            new_block=lambda: None,
            rms_norm=self.rms_norm,
            add=self.add,
            add_norm=self.add_norm,
            rotate_store=self.rotate_store,
            route=self.route,
            best=self.best,
            attention=self.attention,
            gate=self.gate,
            gated_delta=self.gated_delta,
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

    def route(self, logits: Tensor, slots: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        ids = torch.empty(len(logits), top_k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(len(logits), top_k, device=logits.device)
        route.route(logits, slots, top_k, renormalise, ids, weights)
        return ids, weights

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


class CudaLinear:
    """Each part's rows are a view of one matrix, as the checkpoint has them."""

    def __init__(
        self, outs: Mapping[str, int], inputs: int, bias: bool, device: torch.device, out: torch.dtype = torch.bfloat16
    ) -> None:
        self._outs, self._out = dict(outs), out
        rows = sum(outs.values())
        self.weight = torch.empty(rows, inputs, dtype=torch.bfloat16, device=device)
        self.bias = torch.empty(rows, dtype=torch.bfloat16, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > linear.MOST_TOKENS and self._out == x.dtype:
            return functional.linear(x, self.weight, self.bias)
        if len(x) > linear.MOST_TOKENS:  # a head, which has no bias: its sums are not rounded
            return torch.mm(x, self.weight.T, out_dtype=self._out)
        out = torch.empty(len(x), len(self.weight), dtype=self._out, device=x.device)
        linear.linear(x, self.weight, self.bias, out)
        return out

    def parameters(self) -> Parameters:
        sizes = list(self._outs.values())
        for name, part in zip(self._outs, torch.split(self.weight, sizes), strict=True):
            yield f"{name}.weight", part
        if self.bias is not None:
            for name, vector in zip(self._outs, torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", vector


class CudaMlp:
    def __init__(self, hidden: int, width: int, bias: bool, device: torch.device) -> None:
        self._gate_up = CudaLinear({"gate": width, "up": width}, hidden, bias, device)
        self._down = CudaLinear({"down": hidden}, width, bias, device)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(functional.silu(gate).mul_(up))

    def parameters(self) -> Parameters:
        yield from self._gate_up.parameters()
        yield from self._down.parameters()


class CudaEmbedding:
    def __init__(self, vocab: int, hidden: int, device: torch.device) -> None:
        self._table = CudaLinear({"embed": vocab}, hidden, False, device, out=torch.float32)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._table.weight.index_select(0, tokens)

    def logits(self, x: Tensor) -> Tensor:
        return self._table(x)

    def parameters(self) -> Parameters:
        yield "weight", self._table.weight


class CudaMaps:
    def __init__(self, device: torch.device, new_experts: NewExperts) -> None:
        self._device = device
        self.experts = new_experts

    def linear(self, outs: Mapping[str, int], inputs: int, bias: bool) -> CudaLinear:
        return CudaLinear(outs, inputs, bias, self._device)

    def head(self, vocab: int, hidden: int) -> CudaLinear:
        return CudaLinear({"head": vocab}, hidden, False, self._device, out=torch.float32)

    def mlp(self, hidden: int, width: int, bias: bool) -> CudaMlp:
        return CudaMlp(hidden, width, bias, self._device)

    def embedding(self, vocab: int, hidden: int, tied: bool) -> CudaEmbedding:
        return CudaEmbedding(vocab, hidden, self._device)

    def vector(self, width: int) -> Tensor:
        return torch.empty(width, dtype=torch.bfloat16, device=self._device)

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device)
