"""Rotary angles for every frequency scaling. Never: reading config, rotating tensors (ops do that)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from proa.models.spec import Rope, RopeScaling


def dynamic_lengths(ropes: Iterable[Rope]) -> list[int]:
    """For each dynamic rope, the length above which its angles depend on the prompt's length."""
    return [rope.scaling.original_positions for rope in ropes if rope.scaling and rope.dynamic]


def cos_sin(rope: Rope, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, dim/2], for rows at `positions` int64 [T], or [axes, T] (see Rope.axes).

    lengths: int64 [T], max(prompt length, position + 1) of each row, so that angles do not depend on chunking. Only
    dynamic scaling reads it.
    """
    if rope.dynamic:
        unique, which = torch.unique(lengths, return_inverse=True)
        freqs = torch.stack([_dynamic(rope, int(n)) for n in unique.tolist()])[which]
        factor = 1.0
    else:
        freqs, factor = inverse_frequencies(rope)
    own = positions[:, None] if positions.dim() == 1 else positions[axes_of(rope)].T  # [T, dim/2], or one for all
    angles = own.float() * freqs
    return angles.cos() * factor, angles.sin() * factor


def axes_of(rope: Rope) -> Tensor:
    """The axis of the position that each frequency is multiplied with: int64 [dim/2]."""
    return torch.tensor(rope.axes or (0,) * (rope.dim // 2))


def inverse_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [dim/2], and the factor of cos and sin (YaRN's attention temperature)."""
    plain = _plain(rope.dim, rope.base)
    match rope.scaling:
        case None:
            return plain, 1.0
        case RopeScaling(kind="linear", factor=factor):
            return plain / factor, 1.0
        case RopeScaling(kind="factors", factors=factors):
            return plain / torch.tensor(factors), 1.0
        case RopeScaling(kind="llama3") as scaling:
            return _llama3(plain, scaling), 1.0
        case RopeScaling(kind="yarn") as scaling:
            return _yarn(rope, plain, scaling), _yarn_factor(scaling)
    raise ValueError(f"{rope.scaling} has no fixed frequencies")


def _plain(dim: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _dynamic(rope: Rope, length: int) -> Tensor:
    """Inverse frequencies with an NTK-aware base that grows with the length beyond the original positions."""
    assert rope.scaling is not None
    factor, original = rope.scaling.factor, rope.scaling.original_positions
    length = max(length, original)
    stretch = (factor * length / original) - (factor - 1)
    return _plain(rope.dim, rope.base * stretch ** (rope.dim / (rope.dim - 2)))


def _llama3(plain: Tensor, s: RopeScaling) -> Tensor:
    """Low frequencies / factor, high ones kept, a linear ramp between (Llama 3.1's rope_type "llama3")."""
    rotations = s.original_positions * plain / (2 * math.pi)
    keep = ((rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return plain * keep + plain / s.factor * (1 - keep)


def _yarn(rope: Rope, plain: Tensor, s: RopeScaling) -> Tensor:
    """NTK-by-parts (arXiv 2309.00071, section 3.2): high frequencies are kept, low ones interpolated."""

    def dim_of(rotations: float) -> float:
        return rope.dim * math.log(s.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2).float() - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain * keep + plain / s.factor * (1 - keep)


def score_factor(rope: Rope) -> float:
    """Factor of latent attention's score scale: the part of YaRN's temperature that applies to the whole head, not only
    to its rotary dimensions."""
    s = rope.scaling
    return _mscale(s, s.mscale_all_dim) ** 2 if s is not None and s.mscale_all_dim else 1.0


def _mscale(s: RopeScaling, weight: float) -> float:
    return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0


def _yarn_factor(s: RopeScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return _mscale(s, s.mscale) / _mscale(s, s.mscale_all_dim)
    return _mscale(s, 1.0)
