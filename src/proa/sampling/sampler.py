"""Samples one token per row: temperature, top-k, top-p, min-p, inverse transform sampling.

Order: temperature, top_k, top_p over the remaining tokens, min_p relative to the most likely token. Sampling inverts
the cumulative distribution at the row's uniform random number, in float64, so that a row does not depend on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proa.sampling.adjust import adjust
from proa.sampling.rows import Row

# Truncated rows consider this many most likely tokens first; sorting a whole vocabulary is 20x slower and hardly ever
# needed.
HEAD_TOKENS = 1024


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Sample one token id per row. logits: float32 [R, vocab], finite. Greedy rows take the lowest of equal maxima's
    ids."""
    scores = adjust(logits, rows)
    tokens = [0] * len(rows)
    by_method: dict[Callable[[Tensor, Sequence[Row]], list[int]], list[int]] = {}
    for r, row in enumerate(rows):
        if row.sampling.temperature > 0:
            by_method.setdefault(_sample_truncated if _is_truncated(row) else _sample_full, []).append(r)
        else:
            tokens[r] = int(scores[r].argmax())
    for draw, chosen in by_method.items():
        scaled = _divide_by_temperature(scores, rows, chosen)
        for r, token in zip(chosen, draw(scaled, [rows[r] for r in chosen]), strict=True):
            tokens[r] = token
    return tokens


def _divide_by_temperature(scores: Tensor, rows: Sequence[Row], chosen: list[int]) -> Tensor:
    """Divide the chosen rows, shifted so that each maximum is 0, by their temperatures; float64. With the shift no
    temperature is too small."""
    temperatures = torch.tensor([rows[r].sampling.temperature for r in chosen], dtype=torch.float64)
    picked = scores[chosen]
    return (picked - picked.amax(-1, keepdim=True)).double() / temperatures[:, None]


def _is_truncated(row: Row) -> bool:
    return row.sampling.top_k > 0 or row.sampling.top_p < 1.0 or row.sampling.min_p > 0.0


def _sample_full(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    return _invert_cdf(torch.softmax(scores, -1), rows)


def _sample_truncated(scores: Tensor, rows: Sequence[Row], width: int = HEAD_TOKENS) -> list[int]:
    """Sample from each row's `width` most likely tokens; rows that keep more tokens are sampled again from all."""
    width = min(width, scores.shape[-1])
    best, ids = torch.topk(scores, width)
    probs = (best - torch.logsumexp(scores, -1, keepdim=True)).exp()
    kept, reaches_on = _truncate(probs, rows)
    places = torch.tensor(_invert_cdf(probs * kept, rows))
    tokens: list[int] = ids.gather(-1, places[:, None])[:, 0].tolist()
    if width < scores.shape[-1] and (again := torch.nonzero(reaches_on)[:, 0].tolist()):
        redrawn = _sample_truncated(scores[again], [rows[r] for r in again], scores.shape[-1])
        for r, token in zip(again, redrawn, strict=True):
            tokens[r] = token
    return tokens


def _truncate(probs: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Truncate by top_k, top_p and min_p. probs: float64 [R, N], descending.

    Returns (mask [R, N] of the tokens kept, mask [R] of the rows that may keep tokens beyond the Nth). The most likely
    token is always kept.
    """
    wishes = [row.sampling for row in rows]
    num_probs = probs.shape[-1]
    top_k = torch.tensor([s.top_k or 2**62 for s in wishes])[:, None]
    top_p = torch.tensor([s.top_p if s.top_p < 1.0 else math.inf for s in wishes], dtype=torch.float64)[:, None]
    min_p = torch.tensor([s.min_p for s in wishes], dtype=torch.float64)[:, None]
    kept = torch.arange(num_probs) < top_k
    mass = torch.where(top_k <= num_probs, (probs * kept).sum(-1, keepdim=True), 1.0)
    before = probs.cumsum(-1) - probs
    kept &= (before < top_p * mass) & (probs >= min_p * probs[:, :1])
    kept[:, 0] = True
    return kept, kept[:, -1] & (top_k[:, 0] > num_probs)


def _invert_cdf(probs: Tensor, rows: Sequence[Row]) -> list[int]:
    """Return per row the first index at which the cumulative sum of probs, float64 [R, N], exceeds the row's uniform
    number, scaled by the row's total."""
    sums = probs.cumsum(-1)
    marks = torch.tensor([row.uniform() for row in rows], dtype=torch.float64) * sums[:, -1]
    places = torch.searchsorted(sums, marks[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)
    for r in torch.nonzero(probs.gather(-1, places[:, None])[:, 0] == 0)[:, 0].tolist():
        places[r] = torch.nonzero(probs[r])[-1, 0]  # rounding went past the last token of nonzero probability
    return places.tolist()
