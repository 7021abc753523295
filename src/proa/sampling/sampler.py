"""Draw one token per row. Belongs here: temperature, top-k, top-p, min-p, the draw. Never: penalties, requests.

Order: temperature, top_k, top_p over what is left, min_p (relative to the best token). The draw inverts
the cumulative distribution at the row's own uniform number, in float64, so it depends on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    tokens = scores.argmax(-1).tolist()
    by_method: dict[bool, list[int]] = {False: [], True: []}
    for r, row in enumerate(rows):
        if row.sampling.temperature > 0:
            by_method[_is_cut(row)].append(r)
    for is_cut, chosen in by_method.items():
        if chosen:
            warm = torch.tensor([rows[r].sampling.temperature for r in chosen])
            draw = _draw_cut if is_cut else _draw_whole
            for r, token in zip(chosen, draw(scores[chosen] / warm[:, None], [rows[r] for r in chosen]), strict=True):
                tokens[r] = token
    return tokens


def _is_cut(row: Row) -> bool:
    return row.sampling.top_k > 0 or row.sampling.top_p < 1.0 or row.sampling.min_p > 0.0


def _draw_whole(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    return _invert(torch.softmax(scores.double(), -1), rows)


def _draw_cut(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    tokens = []
    for row_scores, row in zip(scores, rows, strict=True):
        total = torch.logsumexp(row_scores.double(), -1)
        for width in (min(max(HEAD_TOKENS, row.sampling.top_k), len(row_scores)), len(row_scores)):
            best, ids = torch.topk(row_scores, width)
            probs = (best.double() - total).exp()
            kept = _kept(probs, row)
            if not kept[-1] or row.sampling.top_k in range(1, width + 1) or width == len(row_scores):
                break
        (place,) = _invert((probs * kept)[None], [row])
        tokens.append(int(ids[place]))
    return tokens


def _kept(probs: Tensor, row: Row) -> Tensor:
    """Which of the probabilities, best first, survive; the best one always does."""
    s = row.sampling
    kept = torch.ones_like(probs, dtype=torch.bool)
    if s.top_k > 0:
        kept[s.top_k :] = False
    mass = (probs * kept).sum() if s.top_k > 0 else 1.0
    if s.top_p < 1.0:
        before = probs.cumsum(-1) - probs
        kept &= before < s.top_p * mass
    if s.min_p > 0.0:
        kept &= probs >= s.min_p * probs[0]
    kept[0] = True
    return kept


def _invert(probs: Tensor, rows: Sequence[Row]) -> list[int]:
    """The first index where the cumulative sum of float64 [R, N] passes each row's uniform number."""
    sums = probs.cumsum(-1)
    marks = torch.tensor([row.uniform() for row in rows], dtype=torch.float64) * sums[:, -1]
    places = torch.searchsorted(sums, marks[:, None], right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)  # rounding may pass the last possible token
    return torch.minimum(places, last).tolist()
