"""Shapes of types, which tests/interpreter.py makes once, are checked and compared as Triton does."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from have_gpu import HAVE_GPU

pytestmark = pytest.mark.skipif(HAVE_GPU, reason="kernels run on the GPU here")


@triton.jit
def _sums(out, rows: tl.constexpr, columns: tl.constexpr, other: tl.constexpr):
    a, b = tl.arange(0, rows)[:, None] * 10, tl.arange(0, columns)[None, :]
    both = a + b + tl.zeros([rows, other], tl.int32)
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out + at, both + both.shape[1] + both.numel + tl.sum(both, 1)[:, None])


@triton.jit
def _three(out, size: tl.constexpr):
    tl.store(out, tl.sum(tl.zeros([size], tl.int32), 0))


@triton.jit
def _cast(values, out, size: tl.constexpr):
    i = tl.arange(0, size)
    value = tl.load(values + i)
    tl.store(out + i, value.to(tl.int32).to(tl.float32) + value.to(tl.float32))


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("columns", [1, 4, 8])
def test_shapes_of_all_parts(rows: int, columns: int, device: torch.device) -> None:
    out = torch.zeros(rows, columns, dtype=torch.int32)
    _sums[1,](out, rows, columns, columns)
    both = 10 * torch.arange(rows)[:, None] + torch.arange(columns)
    assert torch.equal(out, (both + columns + rows * columns + both.sum(1)[:, None]).int())


def test_wrong_shapes_are_refused_each_time(device: torch.device) -> None:
    out = torch.zeros(8, 8, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(Exception, match="Cannot make_shape_compatible"):
            _sums[1,](out, 8, 8, 4)
        with pytest.raises(Exception, match="power of 2"):
            _three[1,](out, 3)
        _three[1,](out, 4)


def test_casts(device: torch.device) -> None:
    values, out = torch.tensor([0.5, -2.75, 3.0, 1e4]), torch.zeros(4)
    _cast[1,](values, out, 4)
    assert out.tolist() == [0.5, -4.75, 6.0, 2e4]
