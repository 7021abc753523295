"""Shared by the tests of Triton kernels: random inputs, poisoned outputs, and comparison with derived error bounds."""

from __future__ import annotations

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps
BF16 = torch.bfloat16


def rand(rng: torch.Generator, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=rng).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """An output filled with NaN."""
    return torch.full(shape, torch.nan, dtype=dtype)


def stored(value: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    """Error of storing a value: half a unit in the last place, also for subnormals."""
    info = torch.finfo(dtype)
    return value.abs() * info.eps / 2 * 1.01 + info.smallest_normal * info.eps / 2


def assert_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    got, want, bound = got.cpu().double(), want.cpu(), bound.cpu()
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    assert ((got - want).abs() <= bound).all(), f"worst excess {((got - want).abs() - bound).max():.3g}"
