"""Latent attention on an NVIDIA GPU: the products with W_k and W_v, and the ops. Never: kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.ops.caches import LatentPages
from proa.ops.products import batched_into
from proa.ops.sizes import attention_floats
from proa.ops.table import Angles, AttentionBatch, Norm, Parameters
from proa.ops.triton import latent_attention
from proa.ops.triton.head_linear import head_linear
from proa.ops.triton.latent_store import latent_store

FEW_TOKENS = 64  # up to this many, head_linear reads each head's weights once or a few times; above, cuBLAS is faster


class CudaLatentMaps:
    """W_k and W_v as one tensor, bfloat16 [heads, K + V, rank]."""

    def __init__(self, heads: int, keys: int, values: int, rank: int, device: torch.device) -> None:
        self.weight = torch.empty(heads * (keys + values), rank, dtype=torch.bfloat16, device=device)
        self._keys, w_v = torch.split(self.weight.view(heads, keys + values, rank), [keys, values], 1)
        self._values = w_v.transpose(1, 2)

    def queries(self, q: Tensor) -> Tensor:
        (tokens, heads, width), (keys, rank) = q.shape, self._keys.shape[1:]
        out = torch.empty(tokens, heads, rank + width - keys, dtype=q.dtype, device=q.device)
        if tokens <= FEW_TOKENS:
            head_linear(q, self._keys, out)
            return out
        batched_into(q[..., :keys].transpose(0, 1), self._keys, out[..., :rank].transpose(0, 1))
        out[..., rank:] = q[..., keys:]
        return out

    def values(self, seen: Tensor) -> Tensor:
        (tokens, heads, _), values = seen.shape, self._values.shape[2]
        out = torch.empty(tokens, heads, values, dtype=seen.dtype, device=seen.device)
        if tokens <= FEW_TOKENS:
            head_linear(seen, self._values, out)
        else:
            batched_into(seen.transpose(0, 1), self._values, out.transpose(0, 1))
        return out.flatten(1)

    def parameters(self) -> Parameters:
        yield "kv_b.weight", self.weight


class CudaLatentAttention:
    """Implements latent_store and latent_attention of ops/table.py."""

    def __init__(self, processors: int, shared_bytes: int, least_rows: int = 1) -> None:
        """processors: SMs of the device; shared_bytes: shared memory that a thread block may use. least_rows: see
        CudaOps."""
        self._processors, self._shared_bytes, self._least_rows = processors, shared_bytes, least_rows

    def store(self, q: Tensor, kv: Tensor, norm: Norm, angles: Angles, cache: LatentPages, slots: Tensor) -> Tensor:
        latent_store(q, kv, norm, angles, cache, slots)
        return q

    def attend(self, q: Tensor, cache: LatentPages, batch: AttentionBatch, scale: float) -> Tensor:
        """`batch` must have device tensors."""
        at = batch.on_device
        (rows, heads, _), rank, shared = q.shape, cache.rank, self._shared_bytes
        out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
        if at.rows_each != 1:
            latent_attention.prefill(q, cache, at.page_table, at.q_starts, at.kv_lens, scale, shared, out)
            return out
        splits = latent_attention.splits_for(max(rows, self._least_rows), heads, self._processors, shared)
        space = torch.empty(attention_floats(rows, heads, rank, splits), device=q.device)
        latent_attention.decode(q, cache, at.page_table, at.kv_lens, scale, splits, shared, space, out)
        return out
