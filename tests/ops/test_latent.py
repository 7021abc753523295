"""Latent attention of every implementation against float64; see test_ops.py for the bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.op_cases import EPS32, OPS_AND_TYPES, Run, assert_within, rand, stored
from proa.ops.caches import LatentPages
from proa.ops.table import Angles, Norm, batch_of

WIDTHS = [(32, 8), (40, 16), (512, 64)]  # (rank, rotary dims)


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize(("rank", "rotary"), WIDTHS)
@pytest.mark.parametrize(("rows", "heads", "plain"), [(1, 3, 24), (70, 2, 8)])
def test_store(
    ops: Run, dtype: torch.dtype, rank: int, rotary: int, rows: int, heads: int, plain: int, rng: torch.Generator
) -> None:
    q = rand(rng, rows, heads, plain + rotary, dtype=dtype)
    kv = rand(rng, rows, rank + rotary + 8, dtype=dtype)[:, : rank + rotary]
    weight, angle = rand(rng, rank, dtype=dtype), rand(rng, rows, rotary // 2) * 3
    cache = LatentPages(torch.full((9, 8, rank + rotary), torch.nan, dtype=dtype), rank)
    slots = torch.randperm(72, generator=rng)[:rows]
    got = ops.latent_store(q, kv, Norm(weight, 1e-6), Angles(angle.cos(), angle.sin(), True), cache, slots)
    latents, cached = kv[:, :rank].double(), cache.rows.flatten(0, 1)
    want = weight.double() * latents / (latents.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_within(cached[slots, :rank], want, want.abs() * (rank / 2 + 9) * EPS32 + stored(want, dtype))
    for turns, before in ((cached[slots, rank:][:, None], kv[:, None, rank:]), (got[..., plain:], q[..., plain:])):
        a, b = before.double()[..., 0::2], before.double()[..., 1::2]
        cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
        want = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        size = torch.stack((a.abs() + b.abs(),) * 2, -1).flatten(-2)
        assert_within(turns, want, size * 4 * EPS32 + stored(want, dtype))
    assert torch.equal(got[..., :plain], q[..., :plain])
    others = torch.ones(72, dtype=torch.bool)
    others[slots] = False
    assert cached[others].isnan().all()


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize(("rank", "rotary"), WIDTHS)
@pytest.mark.parametrize(("rows", "heads", "keys", "values"), [(1, 3, 24, 16), (37, 2, 8, 40)])
def test_maps(
    ops: Run, dtype: torch.dtype, rank: int, rotary: int, rows: int, heads: int, keys: int, values: int,
    rng: torch.Generator,
) -> None:  # fmt: skip
    q, seen = rand(rng, rows, heads, keys + rotary, dtype=dtype), rand(rng, rows, heads, rank, dtype=dtype)
    weight = rand(rng, heads, keys + values, rank, dtype=dtype)
    queries, mapped = ops.latent_maps(q, seen, weight, keys)
    check_map(queries[..., :rank], q[..., :keys], weight[:, :keys])
    assert torch.equal(queries[..., rank:], q[..., keys:])
    check_map(mapped.view(rows, heads, values), seen, weight[:, keys:].mT)


def check_map(got: Tensor, x: Tensor, weight: Tensor) -> None:
    want = torch.einsum("thk,hkr->thr", x.double(), weight.double())
    size = torch.einsum("thk,hkr->thr", x.double().abs(), weight.double().abs())
    assert_within(got, want, size * (x.shape[2] + 4) * EPS32 + stored(want, got.dtype))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize(("rank", "rotary"), WIDTHS)
@pytest.mark.parametrize(("q_lens", "kv_lens"), [([1, 1], [1, 33]), ([5, 1, 18], [9, 70, 18])])
@pytest.mark.parametrize("heads", [3, 16])
def test_attention(
    ops: Run, dtype: torch.dtype, rank: int, rotary: int, q_lens: list[int], kv_lens: list[int], heads: int,
    rng: torch.Generator,
) -> None:  # fmt: skip
    page_tokens, width, scale = 4, rank + rotary, (rank + rotary) ** -0.5
    counts = [-(-n // page_tokens) for n in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=rng).tolist()
    pages = [[order.pop() for _ in range(n)] for n in counts]
    batch = batch_of(q_lens, kv_lens, pages, page_tokens)
    # Slots past the end of a sequence are finite, and must not matter.
    cache = LatentPages(torch.full((sum(counts) + 3, page_tokens, width), 1e4, dtype=dtype), rank)
    rows = [rand(rng, n, width, dtype=dtype) for n in kv_lens]
    for s, n in enumerate(kv_lens):
        cache.rows.flatten(0, 1)[batch_of([n], [n], [pages[s]], page_tokens).slots] = rows[s]
    q = rand(rng, sum(q_lens), heads, width, dtype=dtype)
    # W_k and W_v that are the identity: keys and values are the latents themselves.
    weight = torch.eye(rank).expand(heads, 2, rank, rank).reshape(heads, 2 * rank, rank).to(dtype)
    got = ops.latent_attention(q, weight, rank, cache, batch, scale).view(len(q), heads, rank)
    first = 0
    for s, (q_len, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        mine, keys = q[first : first + q_len].double().transpose(0, 1), rows[s].double()
        hidden = torch.arange(n - q_len, n)[:, None] < torch.arange(n)
        p = torch.softmax((mine @ keys.T * scale).masked_fill(hidden, -torch.inf), -1)
        want, size = p @ keys[:, :rank], p @ keys[:, :rank].abs()
        # Probabilities may be stored in the values' type; scores err by eps32 of their terms.
        wobble = (mine.abs() @ keys.abs().T * scale).amax(-1, keepdim=True) * (width + 4) * EPS32
        bound = size * (4 * wobble + 3 * torch.finfo(dtype).eps + (n + 8) * EPS32) + stored(want, dtype)
        assert_within(got[first : first + q_len].transpose(0, 1), want, bound)
        first += q_len
