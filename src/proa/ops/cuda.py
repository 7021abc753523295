"""The ops on an NVIDIA GPU: bfloat16 activations, kernels in Triton, cuBLAS for many rows. They compute when called, on
the current stream, without waiting for anything: a CUDA graph can hold them. Never: kernels, residency of experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from proa.ops.cuda_linear import CudaLinear, PlainMatrix
from proa.ops.staging import Staging
from proa.ops.table import Angles, AttentionBatch, KvPages, NewExperts, Ops, Parameters, QkNorm
from proa.ops.triton import attention, best, route
from proa.ops.triton import heads as rotations
from proa.ops.triton import norm as norms
from proa.ops.triton.gated import silu_mul


class CudaOps:
    """Implements the functions of ops/table.py."""

    def __init__(self, device: torch.device, new_experts: NewExperts, staging: Staging) -> None:
        self._maps = CudaMaps(device, new_experts, staging)
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
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norms.rms_norm(x, weight, eps, out)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        norms.add_rms_norm(x, y, weight, eps, out)
        return x, out

    def rotate_store(
        self, qkv: Tensor, heads: int, norm: QkNorm | None, angles: Angles, cache: KvPages, slots: Tensor
    ) -> Tensor:
        kv_heads, per_head = cache.keys.shape[2], norm
        if norm is not None and len(norm.q) != qkv.shape[2]:  # over all heads together
            per_head = None
            for part, weight in ((qkv[:, :heads], norm.q), (qkv[:, heads : heads + kv_heads], norm.k)):
                rows = part.flatten(1)
                norms.rms_norm(rows, weight, norm.eps, rows)
        rotations.rotate_store(qkv, per_head, angles, cache, slots)
        return qkv[:, :heads]

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

    def head(self, vocab: int, hidden: int) -> CudaLinear:
        return CudaLinear({"head": vocab}, hidden, False, self._device, self._staging, out=torch.float32)

    def mlp(self, hidden: int, width: int, bias: bool) -> CudaMlp:
        return CudaMlp(hidden, width, bias, self._device, self._staging)

    def embedding(self, vocab: int, hidden: int, tied: bool) -> CudaEmbedding:
        return CudaEmbedding(vocab, hidden, self._device)

    def vector(self, width: int) -> Tensor:
        return torch.empty(width, dtype=torch.bfloat16, device=self._device)
