"""Head norms, rotary embedding and the store into the cache, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from proa.ops.caches import KvPages
from proa.ops.reference import to_e4m3
from proa.ops.table import Angles, QkNorm
from proa.ops.triton.heads import gate, rotate_store


def rotary(x: Tensor, rotation: Angles) -> Tensor:
    """float64 [T, heads, D], as a product of complex numbers."""
    half = rotation.cos.shape[1]
    first = torch.arange(half) * (2 if rotation.interleaved else 1)
    second = first + (1 if rotation.interleaved else half)
    turn = torch.complex(rotation.cos.double(), rotation.sin.double())[:, None]
    product = torch.complex(x[..., first], x[..., second]) * turn
    out = x.clone()
    out[..., first], out[..., second] = product.real, product.imag
    return out


def rotated(x: Tensor, weight: Tensor | None, rotation: Angles, offset: float) -> tuple[Tensor, Tensor]:
    """x [T, heads, D] after norm and rotation, in float64, and its error bound."""
    slack = torch.zeros_like(x, dtype=torch.float64)
    if weight is not None:
        exact = (weight.double() + offset) * x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        rounded = exact.to(BF16)
        # Where float32's error changes the direction of rounding, the result is the neighbouring value: a whole unit.
        error = exact.abs() * (x.shape[-1] / 2 + 9) * EPS32
        close = (exact + error).to(BF16) != (exact - error).to(BF16)
        slack = torch.where(close, exact.abs() * torch.finfo(BF16).eps, 0)
        x = rounded
    want = rotary(x.double(), rotation)
    size = (x.double().abs() + slack).sum(-1, keepdim=True)
    moved = slack.sum(-1, keepdim=True).expand_as(want)  # at most all of a head's neighbours at once
    return want, size * 4 * EPS32 + stored(want) + moved * 1.01


@pytest.mark.parametrize(("norm", "gated", "offset"), [(False, False, 0.0), (True, False, 0.0), (True, True, 1.0)])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "turning", "interleaved"),
    [
        (1, 4, 1, 128, 128, False),
        (5, 3, 3, 80, 80, True),
        (3, 4, 2, 96, 32, False),
        (2, 2, 1, 192, 64, True),
        (70, 2, 1, 16, 8, False),
        (3, 2, 1, 24, 2, False),
    ],
)
def test_rotate_store(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    turning: int,
    interleaved: bool,
    norm: bool,
    gated: bool,
    offset: float,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    page_tokens, pages = 5, rows
    apart = 2 if gated else 1  # heads of q from one to the next
    qkv = rand(rng, rows, apart * heads + 2 * kv_heads, dim)
    slots = torch.randperm(pages * page_tokens, generator=rng)[:rows]
    if rows > 1:
        slots[rows // 2] = -1
    live = slots >= 0
    angles = rand(rng, rows, turning // 2, dtype=torch.float32) * 10
    rotation = Angles(angles.cos(), angles.sin(), interleaved)
    norms = QkNorm(rand(rng, dim), rand(rng, dim), 1e-6, offset) if norm else None

    got = qkv.clone().to(device)
    pool = poisoned(pages, 2, page_tokens, kv_heads, dim).to(device)
    cache = KvPages(pool[:, 0], pool[:, 1])
    q, kv = torch.split(got, [apart * heads, 2 * kv_heads], 1)
    out = poisoned(rows, heads, dim).to(device) if gated else q
    rotate_store(
        q[:, ::apart],
        kv,
        None if norms is None else QkNorm(norms.q.to(device), norms.k.to(device), norms.eps, offset),
        Angles(rotation.cos.to(device), rotation.sin.to(device), interleaved),
        cache,
        slots.to(device),
        out,
    )

    every, k, v = (t.clone() for t in torch.split(qkv, [apart * heads, kv_heads, kv_heads], 1))
    want, bound = rotated(every[:, ::apart], None if norms is None else norms.q, rotation, offset)
    assert_within(out.cpu()[live], want[live], bound[live])
    assert out.cpu()[~live].isnan().all() if gated else torch.equal(out.cpu()[~live], every[~live])
    assert torch.equal(got.cpu(), qkv) if gated else torch.equal(kv.cpu(), qkv[:, heads:])
    keys, values = (t.cpu().flatten(0, 1) for t in (cache.keys, cache.values))
    want, bound = rotated(k, None if norms is None else norms.k, rotation, offset)
    assert_within(keys[slots[live]], want[live], bound[live])
    assert torch.equal(values[slots[live]], v[live])
    for stored_rows in (keys, values):
        untouched = torch.ones(len(stored_rows), dtype=torch.bool)
        untouched[slots[live]] = False
        assert stored_rows[untouched].isnan().all()


@pytest.mark.parametrize(("dim", "turning", "norm"), [(128, 64, True), (24, 24, False), (80, 40, False)])
def test_rotate_store_in_e4m3(dim: int, turning: int, norm: bool, rng: torch.Generator, device: torch.device) -> None:
    """The values of a bfloat16 cache, divided by the scale and rounded; unused slots are unchanged."""
    rows, heads, kv_heads, page_tokens = 9, 3, 2, 5
    qkv = rand(rng, rows, heads + 2 * kv_heads, dim) * 20
    qkv[0, -1, :3] = torch.tensor([torch.nan, torch.inf, -1e30])
    slots = torch.randperm(4 * page_tokens, generator=rng)[:rows]
    slots[4] = -1
    angles = rand(rng, rows, turning // 2, dtype=torch.float32).to(device) * 10
    rotation = Angles(angles.cos(), angles.sin(), False)
    norms = QkNorm(rand(rng, dim).to(device), rand(rng, dim).to(device), 1e-6) if norm else None
    wide = KvPages(*poisoned(2, 4, page_tokens, kv_heads, dim).to(device))
    codes = torch.full((2, 4, page_tokens, kv_heads, dim), 0x7F, dtype=torch.uint8, device=device)
    scales = torch.tensor([0.37, 1.7]).tolist()  # as float32 has them
    narrow = KvPages(*codes.view(torch.float8_e4m3fn), *scales)
    for cache in (wide, narrow):
        got = qkv.clone().to(device)
        q, kv = torch.split(got, [heads, 2 * kv_heads], 1)
        rotate_store(q, kv, norms, rotation, cache, slots.to(device), q)
    live = slots[slots >= 0]
    for have, want, scale in zip((narrow.keys, narrow.values), (wide.keys, wide.values), scales, strict=True):
        expected = to_e4m3(want.cpu(), scale).float()  # NaN where nothing was written
        assert torch.equal(have.cpu().float().nan_to_num(1e9), expected.nan_to_num(1e9))
        assert have.cpu().float().flatten(0, 1)[live].isnan().sum() == (2 if scale == scales[1] else 0)
    assert narrow.values.cpu().float().flatten(0, 1)[slots[0], -1, 2] == -448


@pytest.mark.parametrize("apart", [1, 2])
def test_gate(apart: int, rng: torch.Generator, device: torch.device) -> None:
    x, other = rand(rng, 5, 3, 24), rand(rng, 5, 3 * apart, 24) * 4
    got = x.clone().to(device)
    gate(got, other.to(device)[:, ::apart])
    want = x.double() * torch.sigmoid(other[:, ::apart].double())
    assert_within(got, want, want.abs() * 8 * EPS32 + stored(want))


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    cache = KvPages(*torch.zeros(2, 1, 4, 2, 16, dtype=BF16, device=device))
    qkv, slots = torch.zeros(3, 8, 16, dtype=BF16, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    q, kv = qkv[:, :4], qkv[:, 4:]
    angles = torch.zeros(3, 8, device=device)
    rotation = Angles(angles, angles, False)
    with pytest.raises(ValueError, match="cos"):
        rotate_store(q, kv, None, Angles(angles[:2], angles[:2], False), cache, slots, q)
    with pytest.raises(ValueError, match="slots"):
        rotate_store(q, kv, None, rotation, cache, slots[:2], q)
    with pytest.raises(ValueError, match="does not fit a cache"):
        rotate_store(q, kv[:, 1:], None, rotation, cache, slots, q)
    with pytest.raises(ValueError, match="must have heads"):
        rotate_store(q[:, ::2], kv, None, rotation, cache, slots, q[:, ::2])
    with pytest.raises(ValueError, match="do not fit"):
        gate(q[:, ::2], q[:, ::2])
