"""What the chunked form of the gated delta rule may be off by within a chunk: its steps in float64, each with the error
that its type leaves (docs/decisions/033). Never: tests, the kernels' tiles.

Factors of products are pairs of bfloat16, off by 2 ** -18 of each; their lower parts' product, 2 ** -18, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps
PAIRS = 3 * 2.0**-18
TINY = torch.finfo(torch.float32).smallest_normal  # what is less may become 0
CHUNK = 64  # rows


@dataclass(frozen=True)
class Near:
    """Numbers, and how far off computed ones may be."""

    value: Tensor
    error: Tensor

    def __matmul__(self, other: Near) -> Near:
        """A product of pairs, added up in float32."""
        a, b = self.value.abs(), other.value.abs()
        rounding = (PAIRS + (a.shape[-1] + 8) * EPS32) * ((a + self.error) @ (b + other.error))
        error = a @ other.error + self.error @ b + self.error @ other.error
        return Near(self.value @ other.value, error + rounding + TINY)

    def __mul__(self, other: Near) -> Near:
        value = self.value * other.value
        error = self.value.abs() * other.error + self.error * other.value.abs() + self.error * other.error
        return Near(value, error + (value.abs() + error) * EPS32 + TINY)

    def __sub__(self, other: Near) -> Near:
        value, error = self.value - other.value, self.error + other.error
        return Near(value, error + (value.abs() + error) * EPS32)

    def __add__(self, other: Near) -> Near:
        return self - Near(-other.value, other.error)

    def where(self, mask: Tensor) -> Near:
        return Near(self.value * mask, self.error * mask)

    def turned(self) -> Near:
        return Near(self.value.mT, self.error.mT)


def plain(value: Tensor) -> Near:
    return Near(value, torch.zeros_like(value))


def power(log: Tensor) -> Near:
    """exp of differences of sums, which are off by an eps beside their rounding; exp rounds its argument and itself."""
    value = torch.exp(log)
    return Near(value, value * (2 * log.abs() + 6) * EPS32 + TINY)


def inverted(lower: Near) -> Near:
    """The inverse of 1 + lower [..., CHUNK, CHUNK], strictly lower triangular, as the kernel comes to it."""
    i, size = torch.arange(lower.value.shape[-1], device=lower.value.device), 1
    inverse = plain(torch.eye(len(i), dtype=torch.float64, device=i.device).expand_as(lower.value))
    while size < len(i):
        wide = 2 * size
        between = ((i[:, None] // wide == i // wide) & (i[:, None] // size > i // size)).double()
        inverse = inverse - inverse @ (lower.where(between) @ inverse)
        size = wide
    return inverse


def chunk_errors(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bound the errors of the rows [T, heads, ...] of a chunk, which begins with the state [heads, key_dim, value_dim]:
    lengths of the errors of the outputs [T, heads], and of the state after it [heads]."""
    rows = len(q)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    beta, total = beta.t(), -rate.t().cumsum(1)
    i = torch.arange(rows, device=q.device)
    before = (i[:, None] >= i).double()
    since = power((total[:, :, None] - total[:, None]) * before).where(before)
    passed, left = power(total[..., None]), power((total[:, -1:] - total)[..., None])
    query, key, first = plain(q), plain(k), plain(state)
    lower = (plain(beta[..., None]) * since * (key @ key.turned())).where((i[:, None] > i).double())
    inverse = inverted(lower) * plain(beta[:, None])
    update = inverse @ (plain(v) - passed * (key @ first))
    seen = passed * (query @ first) + (query @ key.turned() * since) @ update
    after = power(total[:, -1, None, None]) * first + key.turned() @ (left * update)
    return seen.error.norm(dim=-1).t(), after.error.flatten(1).norm(dim=1)
