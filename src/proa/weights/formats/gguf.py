"""Exact dequantisation of GGUF blocks to float32. Never: files, model names, matrix products.

Each function takes uint8 [n, block bytes] and returns float32 [n, block elements] with the operations of the
gguf package's reference in the same order, so the bits are equal. d and m are float16; "low nibbles first"
means that elements 0 to 15 lie in bits 0 to 3 of bytes 0 to 15 and elements 16 to 31 in bits 4 to 7.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _half(raw: Tensor) -> Tensor:
    """uint8 [n, 2] -> float32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """uint8 [..., k] -> uint8 [..., 2k], low nibbles first."""
    return torch.cat((raw & 0x0F, raw >> 4), dim=-1)


def _bit_5(raw: Tensor) -> Tensor:
    """uint8 [n, 4], bit i of the 32 -> uint8 [n, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((raw.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q8_0(b: Tensor) -> Tensor:
    """d, 32 int8: d q."""
    return b[:, 2:].view(torch.int8).float().mul_(_half(b[:, :2]))


def _q4_0(b: Tensor) -> Tensor:
    """d, 16 bytes: d (q - 8)."""
    return _nibbles(b[:, 2:]).float().sub_(8).mul_(_half(b[:, :2]))


def _q4_1(b: Tensor) -> Tensor:
    """d, m, 16 bytes: d q + m."""
    return _nibbles(b[:, 4:]).float().mul_(_half(b[:, :2])).add_(_half(b[:, 2:4]))


def _q5_0(b: Tensor) -> Tensor:
    """d, 4 bytes of fifth bits, 16 bytes: d (q - 16)."""
    q = _nibbles(b[:, 6:]) | _bit_5(b[:, 2:6])
    return q.float().sub_(16).mul_(_half(b[:, :2]))


def _q5_1(b: Tensor) -> Tensor:
    """d, m, 4 bytes of fifth bits, 16 bytes: d q + m."""
    q = _nibbles(b[:, 8:]) | _bit_5(b[:, 4:8])
    return q.float().mul_(_half(b[:, :2])).add_(_half(b[:, 2:4]))


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """d, dmin, 12 bytes of packed 6-bit scales and minima -> d scale, dmin min: float32 [n, 8, 1]."""
    low, high, mixed = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((low & 63, (mixed & 15) | ((low >> 2) & 48)), dim=1)
    minimum = torch.cat((high & 63, (mixed >> 4) | ((high >> 2) & 48)), dim=1)
    scales = scale.float() * _half(b[:, :2])
    minima = minimum.float() * _half(b[:, 2:4])
    return scales.unsqueeze(-1), minima.unsqueeze(-1)


def _q4_k(b: Tensor) -> Tensor:
    """Scales, 4 x 32 bytes, each two sub-blocks: d scale q - dmin min."""
    scales, minima = _k_scales(b)
    q = _nibbles(b[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return q.float().mul_(scales).sub_(minima).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    """Scales, 32 bytes of fifth bits (bit j of byte i: element i of sub-block j), 4 x 32 bytes; as Q4_K."""
    scales, minima = _k_scales(b)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((b[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    q = _nibbles(b[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | fifth
    return q.float().mul_(scales).sub_(minima).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of upper bit pairs, 16 int8 scales, d: d scale (q - 32)."""
    low = _nibbles(b[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((b[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales = b[:, 192:208].view(torch.int8).float() * _half(b[:, 208:])
    q = (low | high).view(-1, 16, 16).float().sub_(32)
    return q.mul_(scales.unsqueeze(-1)).flatten(1)


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def dequantise(raw: Tensor, dtype: str, block_bytes: int) -> Tensor:
    """uint8 [rows, bytes] of one of DECODERS -> float32 [rows, elements]."""
    rows = raw.shape[0]
    return DECODERS[dtype](raw.reshape(-1, block_bytes)).view(rows, -1)
