"""Around latent attention on the GPU: the store, and the products with W_k and W_v."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from proa.ops import reference
from proa.ops.caches import LatentPages
from proa.ops.cuda_latent import FEW_TOKENS, CudaLatentAttention, CudaLatentMaps
from proa.ops.gpu_traits import GpuTraits
from proa.ops.table import Angles, Norm
from proa.ops.triton.head_linear import head_linear
from proa.ops.triton.latent_store import latent_store


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(
    ("slots", "heads", "plain", "rank", "rotary"),
    [([5], 3, 24, 32, 8), ([17, -1, 40, 3], 4, 16, 40, 16), ([-1, 33], 2, 128, 512, 64), (list(range(66)), 1, 8, 8, 2)],
)
def test_store(
    slots: list[int],
    heads: int,
    plain: int,
    rank: int,
    rotary: int,
    offset: float,
    interleaved: bool,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    count, page_tokens = len(slots), 16
    wide_q, wide_kv = rand(rng, count, heads + 1, plain + rotary), rand(rng, count, rank + rotary + 3)
    q, kv = wide_q[:, 1:], wide_kv[:, : rank + rotary]
    weight, angle = rand(rng, rank), torch.randn(count, rotary // 2, generator=rng) * 3
    norm, where = Norm(weight, 1e-6, offset), torch.tensor(slots)
    live = where >= 0

    def angles_of(rows: Tensor | slice, to: torch.device) -> Angles:
        return Angles(angle[rows].cos().contiguous().to(to), angle[rows].sin().contiguous().to(to), interleaved)

    cache = LatentPages(poisoned(5, page_tokens, rank + rotary), rank)
    want_cache = LatentPages(cache.rows.clone(), rank)
    want = reference.latent_store(
        q[live], kv[live], norm, angles_of(live, torch.device("cpu")), want_cache, where[live]
    )
    on = LatentPages(cache.rows.to(device), rank)
    whole_q = wide_q.to(device)
    given = whole_q[:, 1:]
    latent_store(
        given, kv.to(device), Norm(weight.to(device), 1e-6, offset), angles_of(slice(None), device), on,
        where.to(device),
    )  # fmt: skip
    assert torch.equal(given.cpu()[~live], q[~live])
    assert torch.equal(whole_q[:, 0].cpu(), wide_q[:, 0])
    got_rows, want_rows = on.rows.cpu().flatten(0, 1), want_cache.rows.flatten(0, 1)
    written = torch.zeros(len(got_rows), dtype=torch.bool)
    written[where[live]] = True
    assert got_rows[~written].isnan().all()
    # The same formulas in float32: sums of a row may differ by roundings of its largest value, then each is rounded.
    for got, expected in ((given.cpu()[live], want), (got_rows[written], want_rows[written])):
        wide = expected.double()
        assert_within(got, wide, wide.abs().amax(-1, keepdim=True) * (rank + 16) * EPS32 + 2 * stored(wide))


@pytest.mark.parametrize(
    ("tokens", "heads", "inputs", "outputs", "carried", "transposed"),
    [(1, 3, 24, 32, 8, False), (17, 2, 32, 16, 0, True), (5, 1, 200, 72, 4, True), (0, 2, 8, 8, 0, False)],
)
def test_maps_of_heads(
    tokens: int,
    heads: int,
    inputs: int,
    outputs: int,
    carried: int,
    transposed: bool,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    x = rand(rng, tokens, heads + 1, inputs + carried)[:, :heads]
    weight = rand(rng, heads, outputs, inputs).mT if transposed else rand(rng, heads, inputs, outputs)
    y = poisoned(tokens, heads, outputs + carried + 1).to(device)
    head_linear(x.to(device), weight.to(device), y[..., :-1])
    assert y[..., -1].isnan().all()
    check_map(y[..., :outputs], x[..., :inputs], weight)
    assert torch.equal(y[..., outputs:-1].cpu(), x[..., inputs:])


def check_map(got: Tensor, x: Tensor, weight: Tensor) -> None:
    want = torch.einsum("thk,hkr->thr", x.double(), weight.double())
    size = torch.einsum("thk,hkr->thr", x.double().abs(), weight.double().abs())
    assert_within(got, want, size * (x.shape[2] + 4) * EPS32 + stored(want))


@pytest.mark.parametrize("tokens", [3, FEW_TOKENS + 1])
def test_queries_and_values(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    """By Proa's kernel or cuBLAS, on weights in the checkpoint's layout."""
    heads, keys, values, rank, rotary = 3, 24, 16, 32, 8
    maps = CudaLatentMaps(heads, keys, values, rank, device, CudaLatentAttention(GpuTraits(90, 1)))
    weight = rand(rng, heads, keys + values, rank)
    ((name, target),) = maps.parameters()
    assert isinstance(target, Tensor)
    assert (name, target.shape) == ("kv_b.weight", (heads * (keys + values), rank))
    target.copy_(weight.flatten(0, 1))
    q, seen = rand(rng, tokens, heads, keys + rotary), rand(rng, tokens, heads, rank)
    got = maps.queries(q.to(device))
    check_map(got[..., :rank], q[..., :keys], weight[:, :keys])
    assert torch.equal(got[..., rank:].cpu(), q[..., keys:])
    check_map(maps.values(seen.to(device)).view(tokens, heads, values), seen, weight[:, keys:].mT)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight, y = (torch.zeros(shape, dtype=BF16, device=device) for shape in ((2, 3, 8), (3, 8, 16), (2, 3, 16)))
    head_linear(x, weight, y)
    for message, args in {
        "do not fit": (x, weight[:2], y),
        "must be contiguous": (x.transpose(1, 2).contiguous().transpose(1, 2), weight, y),
    }.items():
        with pytest.raises(ValueError, match=message):
            head_linear(*args)
