"""Shared by the tests of FP8 x FP8 products: rounding as specified, and error bounds of their sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import EPS32
from proa.ops.triton.fp8_rows import Fp8Rows

NEEDS_FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 in hardware"
)
# NumPy's, in the interpreter: of rows that were not written, or are non-finite
NOT_FINITE = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")

# Hopper's tensor cores accumulate with 14 bits (arXiv 2412.19437, 3.3.2): each of 128 products, and the running sum
# once per 32 of them, may lose a unit in the last place of the sum of all magnitudes.
UNIT_ERROR = (128 + 4) * 2.0**-13


def spec_round(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of rows, in the order of columns, in plain torch. group: 0, all columns."""
    filled = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128))
    parts = filled.unflatten(1, (-1, group or filled.shape[1]))
    size = parts.abs().amax(2).clamp(min=2.0**-100)
    inverse = torch.full_like(size, 448) / size  # 448 / size would be 448 times the reciprocal, rounded twice
    codes = (parts * inverse[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1), size / 448


def in_words(codes: Tensor) -> Tensor:
    """Swap columns to their order in a panel's words, or back."""
    return codes.view(torch.uint8).unflatten(1, (-1, 4))[:, :, [0, 2, 1, 3]].flatten(1)


def values(rows: Fp8Rows, columns: int) -> Tensor:
    """Dequantise rounded rows to float64 [T, columns]."""
    codes = in_words(rows.codes.cpu()).view(torch.float8_e4m3fn).double()
    scales = rows.scales.cpu().double()
    return (codes.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)[:, :columns]


def sum_bound(sizes: Tensor, columns: int, device: torch.device) -> Tensor:
    """Error bound of a sum of products whose magnitudes sum to `sizes`: roundings of float32 and of the tensor
    cores."""
    return sizes * ((columns + 16) * EPS32 + (UNIT_ERROR if device.type == "cuda" else 0.0))
