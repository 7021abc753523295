"""The specification of every op in plain torch: slow, obviously right, on any device. Never: tricks.

Other implementations are tested against these functions; bounds come from operand norms and type epsilon.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from proa.ops.table import AttentionBatch, KvPages, Ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * normed).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]  # one angle for all heads
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out.to(x.dtype), rest), -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    weights, ids = torch.softmax(logits.float(), -1).topk(top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        rows, choice = torch.where(ids == expert)
        y = linear(silu_mul(linear(x[rows], gate_up[expert], None)), down[expert], None)
        out.index_add_(0, rows, y.float() * weights[rows, choice, None])
    return out.to(x.dtype)


def write_kv(keys: Tensor, values: Tensor, cache: KvPages, slots: Tensor) -> None:
    cache.keys.flatten(0, 1).index_copy_(0, slots, keys)
    cache.values.flatten(0, 1).index_copy_(0, slots, values)


def attention(q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None) -> Tensor:
    out = torch.empty_like(q)
    start = 0
    for q_len, kv_len, pages in zip(batch.q_lens, batch.kv_lens, batch.page_table, strict=True):
        rows = slice(start, start + q_len)
        keys, values = (t[pages].flatten(0, 1)[:kv_len].transpose(0, 1) for t in (cache.keys, cache.values))
        mask = _causal(q_len, kv_len, window, q.device)
        seen = functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = seen[0].transpose(0, 1)
        start += q_len
    return out


def _causal(q_len: int, kv_len: int, window: int | None, device: torch.device) -> Tensor | None:
    """[q_len, kv_len], true where a query (the last q_len positions) may look; None where it may look everywhere."""
    if q_len == 1 and (window is None or kv_len <= window):
        return None
    distance = torch.arange(kv_len - q_len, kv_len, device=device)[:, None] - torch.arange(kv_len, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


REFERENCE = Ops(
    rms_norm=rms_norm,
    rotary=rotary,
    linear=linear,
    silu_mul=silu_mul,
    route=route,
    moe_experts=moe_experts,
    write_kv=write_kv,
    attention=attention,
)
