"""Poisoned outputs of the kernel that routes, locates and pushes. Never: tests."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.ops.residency import Located
from proa.ops.triton.choose import ChooseOutputs

EPS = 1e-6


def poisoned(rows: int, width: int, top_k: int, device: torch.device) -> ChooseOutputs:
    def full(dtype: torch.dtype, columns: int, value: float) -> Tensor:
        return torch.full((rows, columns), value, dtype=dtype, device=device)

    nan = float("nan")
    addresses = (full(torch.int64, top_k, 7) for _ in range(2))
    at = Located(full(torch.int32, top_k, -9), *addresses, full(torch.int32, top_k, -9))
    total, normed = (full(torch.bfloat16, width, nan) for _ in range(2))
    return ChooseOutputs(total, normed, full(torch.float32, top_k, nan), at)
