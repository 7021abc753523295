"""Paged KV caches of random sequences, and attention over them in float64 with its error bound.

The error of a float32 logit is (D + 4) roundings of scale * sum|q||k|, which is also the relative error of a weight;
weights are rounded to bfloat16 before they are multiplied with V; a running sum is rescaled once per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, poisoned, rand, stored
from proa.ops.caches import KvPages
from proa.ops.reference import to_e4m3
from proa.ops.triton.attention import Softmax


@dataclass
class Paged:
    """Sequences with shuffled pages; everything that kernels must not read is NaN."""

    cache: KvPages
    page_table: Tensor
    kv_lens: Tensor
    keys: list[Tensor]  # per sequence [kv_len, kv_heads, D], as stored in the cache
    values: list[Tensor]


def paged(
    kv_lens: list[int], kv_heads: int, dim: int, page_tokens: int, rng: torch.Generator, device: torch.device
) -> Paged:
    counts = [-(-n // page_tokens) for n in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=rng)
    pool = poisoned(len(order), 2, page_tokens, kv_heads, dim)
    table = torch.full((len(kv_lens), max(counts) + 2), -(2**20), dtype=torch.int32)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for s, (n, pages) in enumerate(zip(kv_lens, torch.split(order[:-3], counts), strict=True)):
        table[s, : len(pages)] = pages
        place = pages.repeat_interleave(page_tokens)[:n], torch.arange(n) % page_tokens
        keys.append(rand(rng, n, kv_heads, dim))
        values.append(rand(rng, n, kv_heads, dim))
        pool[place[0], 0, place[1]], pool[place[0], 1, place[1]] = keys[-1], values[-1]
    pool = pool.to(device)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    return Paged(KvPages(pool[:, 0], pool[:, 1]), table.to(device), lens, keys, values)


def in_e4m3(p: Paged) -> Paged:
    """The problem with a float8 cache, keys and values each with their scale."""
    scales = torch.tensor([0.03, 1.7]).tolist()  # as float32 has them
    pages = [to_e4m3(t.cpu(), s).to(t.device) for t, s in zip((p.cache.keys, p.cache.values), scales, strict=True)]
    keys, values = (
        [to_e4m3(t, scale).double() * scale for t in of] for of, scale in zip((p.keys, p.values), scales, strict=True)
    )
    return Paged(KvPages(*pages, *scales), p.page_table, p.kv_lens, keys, values)


def attended(q: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention of one sequence's q [n, heads, D], its last n positions: the result in `wide`, and its error bound."""
    rows, heads, dim = q.shape
    kv_len, group = len(keys), heads // keys.shape[1]
    q, keys, values = (t.to(wide).transpose(0, 1) for t in (q, keys, values))
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    distance = torch.arange(kv_len - rows, kv_len)[:, None] - torch.arange(kv_len)
    hidden = ((distance < 0) | (distance >= (softmax.window or kv_len + 1))).to(q.device)
    logits = (q @ keys.mT * softmax.scale).masked_fill(hidden, -torch.inf)
    if softmax.sinks is not None:
        sink = softmax.sinks.to(wide).to(q.device)[:, None, None].expand(heads, rows, 1)
        weights = torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits, -1)
    off = (q.abs() @ keys.abs().mT * softmax.scale).masked_fill(hidden, 0).amax(-1, keepdim=True) * (dim + 6) * EPS32
    half = torch.finfo(BF16).eps / 2
    relative = 2 * off + half + (kv_len + 32) * EPS32
    want = weights @ values
    size = weights @ values.abs()
    return want.transpose(0, 1), (size * relative * 1.01 + stored(want)).transpose(0, 1)


def softmax_of(dim: int, heads: int, window: int | None, sinks: bool, rng: torch.Generator) -> Softmax:
    return Softmax(1 / math.sqrt(dim), window, torch.randn(heads, generator=rng) * 2 if sinks else None)


def on(softmax: Softmax, device: torch.device) -> Softmax:
    sinks = None if softmax.sinks is None else softmax.sinks.to(device)
    return Softmax(softmax.scale, softmax.window, sinks)
