"""Draw one token per row. Belongs here: temperature, top-k, top-p, min-p, the draw. Never: penalties, requests.

Order: temperature, top_k, top_p over what is left, min_p (relative to the best token). The draw inverts
the cumulative distribution at the row's own uniform number, in float64, so it depends on nothing but the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proa.sampling.adjust import adjust
from proa.sampling.rows import Row

# Rows cut by top_p or min_p alone look at this many best tokens first; sorting a whole vocabulary is
# 20x slower and hardly ever needed.
HEAD_TOKENS = 1024


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """logits float32 [R, vocab], finite -> one token id per row. Greedy takes the lowest id of equal best."""
    scores = adjust(logits, rows)
    tokens = [0] * len(rows)
    by_method: dict[Callable[[Tensor, Sequence[Row]], list[int]], list[int]] = {}
    for r, row in enumerate(rows):
        if row.sampling.temperature > 0:
            by_method.setdefault(_draw_cut if _is_cut(row) else _draw_whole, []).append(r)
        else:
            tokens[r] = int(scores[r].argmax())
    for draw, chosen in by_method.items():
        for r, token in zip(chosen, draw(_warm(scores, rows, chosen), [rows[r] for r in chosen]), strict=True):
            tokens[r] = token
    return tokens


def _warm(scores: Tensor, rows: Sequence[Row], chosen: list[int]) -> Tensor:
    """The chosen rows over their temperatures, float64, the best at 0: no temperature is too small for that."""
    temperatures = torch.tensor([rows[r].sampling.temperature for r in chosen], dtype=torch.float64)
    picked = scores[chosen]
    return (picked - picked.amax(-1, keepdim=True)).double() / temperatures[:, None]


def _is_cut(row: Row) -> bool:
    return row.sampling.top_k > 0 or row.sampling.top_p < 1.0 or row.sampling.min_p > 0.0


def _draw_whole(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    return _invert(torch.softmax(scores, -1), rows)


def _draw_cut(scores: Tensor, rows: Sequence[Row], width: int = HEAD_TOKENS) -> list[int]:
    """Draw among each row's `width` best tokens; rows whose cut lies beyond them are drawn again among all."""
    width = min(width, scores.shape[-1])
    best, ids = torch.topk(scores, width)
    probs = (best - torch.logsumexp(scores, -1, keepdim=True)).exp()
    kept, reaches_on = _kept(probs, rows)
    places = torch.tensor(_invert(probs * kept, rows))
    tokens: list[int] = ids.gather(-1, places[:, None])[:, 0].tolist()
    if width < scores.shape[-1] and (again := torch.nonzero(reaches_on)[:, 0].tolist()):
        for r, token in zip(again, _draw_cut(scores[again], [rows[r] for r in again], scores.shape[-1]), strict=True):
            tokens[r] = token
    return tokens


def _kept(probs: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Which of the probabilities float64 [R, N], best first, survive, and which rows might keep some beyond the Nth.

    The best one always survives.
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


def _invert(probs: Tensor, rows: Sequence[Row]) -> list[int]:
    """The first index where the cumulative sum of float64 [R, N] passes each row's uniform number."""
    sums = probs.cumsum(-1)
    marks = torch.tensor([row.uniform() for row in rows], dtype=torch.float64) * sums[:, -1]
    places = torch.searchsorted(sums, marks[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)
    for r in torch.nonzero(probs.gather(-1, places[:, None])[:, 0] == 0)[:, 0].tolist():
        places[r] = torch.nonzero(probs[r])[-1, 0]  # rounding passed the last possible token
    return places.tolist()
