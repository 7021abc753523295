"""Implementations of the ops table, and comparison with derived error bounds. Never: tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isas import ISAS
from ops_run import NativeRun, TorchRun

Run = TorchRun | NativeRun
TORCH = TorchRun()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def natives() -> list[object]:
    """The native ops of every instruction set."""
    return [pytest.param(None if isa.marks else NativeRun(*isa.values), id=isa.id, marks=isa.marks) for isa in ISAS]


OPS_AND_TYPES = [pytest.param(TORCH, dtype, id=f"torch-{dtype}") for dtype in DTYPES] + [
    pytest.param(p.values[0], torch.bfloat16, id=p.id, marks=p.marks) for p in natives()
]


EPS32 = torch.finfo(torch.float32).eps


def rand(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=rng).to(dtype)


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Error of storing a value: half a unit in the last place, also for subnormals."""
    info = torch.finfo(dtype)
    return value.abs() * info.eps / 2 * 1.01 + info.smallest_normal * info.eps / 2


def assert_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    error = (got.double() - want).abs()
    assert torch.isfinite(got).all()
    assert (error <= bound).all(), f"worst excess {(error - bound).max():.3g}"
