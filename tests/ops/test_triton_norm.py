"""RMSNorm kernels against float64. The error of a mean of n squares in float32 is at most n + c roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from proa.ops.table import Norm
from proa.ops.triton import norm


def normed(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    wide = x.double()
    return (weight.double() + offset) * wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def bound_of(want: Tensor) -> Tensor:
    return want.abs() * (want.shape[-1] / 2 + 9) * EPS32 + stored(want)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (2, 2880), (1, 16384), (0, 64), (3, 2, 128), (2, 5, 80)])
@pytest.mark.parametrize(("extra", "offset"), [(0, 0.0), (24, 0.0), (0, 1.0)])
def test_rms_norm(
    shape: tuple[int, ...], extra: int, offset: float, rng: torch.Generator, device: torch.device
) -> None:
    x = rand(rng, shape[0], *shape[1:-1], shape[-1] + extra).to(device)[..., : shape[-1]]
    weight = rand(rng, shape[-1]).to(device)
    out = poisoned(shape[0], *shape[1:-1], shape[-1] + extra).to(device)
    norm.rms_norm(x, Norm(weight, 1e-5, offset), out[..., : shape[-1]])
    want = normed(x, weight, 1e-5, offset)
    assert_within(out[..., : shape[-1]], want, bound_of(want))
    assert out[..., shape[-1] :].isnan().all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 33), (2, 4096)])
def test_add_rms_norm(
    rows: int, width: int, dtype: torch.dtype, offset: float, rng: torch.Generator, device: torch.device
) -> None:
    x, y = rand(rng, rows, width).to(device), rand(rng, rows, width + 8, dtype=dtype).to(device)[:, :width]
    weight, out = rand(rng, width).to(device), poisoned(rows, width).to(device)
    total = (x.float() + y.float()).to(BF16)
    norm.add_rms_norm(x, y, Norm(weight, 1e-6, offset), out)
    assert torch.equal(x, total)
    want = normed(total, weight, 1e-6, offset)
    assert_within(out, want, bound_of(want))


def test_a_row_of_zeros_stays_zero(rng: torch.Generator, device: torch.device) -> None:
    out = poisoned(2, 40).to(device)
    norm.rms_norm(torch.zeros(2, 40, dtype=BF16, device=device), Norm(rand(rng, 40).to(device), 1e-6), out)
    assert not out.any()


@pytest.mark.parametrize("shape", [(2, 16385), (4,)])
def test_unsupported_arguments_are_refused(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.zeros(shape, dtype=BF16, device=device)
    with pytest.raises(ValueError, match=r"columns|shapes"):
        norm.rms_norm(x, Norm(torch.zeros(shape[-1], dtype=BF16, device=device), 1e-6), torch.empty_like(x))
