"""Matrix products by torch's library, which is cuBLAS on a GPU. Never: kernels of Proa's own.

On the meta device they return empty tensors of the right shape. Torch's own meta implementation imports sympy, which
takes longer than the rest of a rehearsal (engine/building/rehearsal.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight^T [K, N] + bias, in the dtype of x."""
    if x.is_meta:
        return torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return functional.linear(x, weight, bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """linear with a wider output dtype: sums are not rounded to the dtype of x."""
    if x.is_meta:
        return torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    sums = torch.mm(x, weight.T, out_dtype=dtype)
    return sums if bias is None else sums.add_(bias)


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """linear into `out` [T, N], whose rows may be strided."""
    if x.is_meta:
        return
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def batched_into(x: Tensor, y: Tensor, out: Tensor) -> None:
    """out [B, T, N] = x [B, T, K] @ y [B, K, N], with any strides."""
    if not x.is_meta:
        torch.bmm(x, y, out=out)
