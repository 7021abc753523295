"""Samples one token per row: temperature, top-k, top-p, min-p, inverse transform sampling.

Order: temperature, top_k, top_p over the remaining tokens, min_p relative to the most likely token. Sampling inverts
the cumulative distribution, summed in float64, at the row's uniform random number. A row does not depend on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from proa.sampling.adjust import adjust
from proa.sampling.rows import Row

# Truncated rows consider this many most likely tokens first (top_k, if it is more), and all tokens if they keep more.
# top_k is 20 in most generation_config.json; sorting a whole vocabulary takes 50 times as long.
HEAD_TOKENS = 64
# Tokens whose maximum is taken first to find the most likely: topk takes 2 ns a logit, maxima 0.1 (Zen 5).
_BLOCK_TOKENS = 64
_LEAST_TEMPERATURE = 1e-30  # below, float32 would divide 0 by 0; here all but the largest logits have probability 0


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Sample one token id per row. logits: float32 [R, vocab], finite. Greedy rows take the lowest of equal maxima's
    ids."""
    scores = adjust(logits, rows)
    tokens = [0] * len(rows)
    by_width: dict[int, list[int]] = {}  # rows by the number of tokens considered first; 0: all
    for r, row in enumerate(rows):
        if row.sampling.temperature > 0:
            by_width.setdefault(max(HEAD_TOKENS, row.sampling.top_k) if row.is_truncated else 0, []).append(r)
        else:
            tokens[r] = int(scores[r].argmax())
    for width, chosen in by_width.items():
        some, of = scores[chosen], [rows[r] for r in chosen]
        drawn = _sample_truncated(some, of, width) if width else _sample_full(some, of)
        for r, token in zip(chosen, drawn, strict=True):
            tokens[r] = token
    return tokens


def _sample_full(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    tokens = list[int]()
    for r, row in enumerate(rows):  # one at a time: a row stays in the caches
        tokens += _invert_cdf(_probs(scores[r : r + 1], scores[r].amax(), row), [row])
    return tokens


def _probs(scores: Tensor, largest: Tensor, row: Row) -> Tensor:
    """Probabilities of a row's whole vocabulary, float32 [1, vocab]. (Where most of them are 0, torch.exp takes five
    times as long as softmax.)"""
    return torch.softmax((scores - largest).div_(_temperature(row)), -1)


def _temperature(row: Row) -> float:
    return max(row.sampling.temperature, _LEAST_TEMPERATURE)


def _sample_truncated(scores: Tensor, rows: Sequence[Row], width: int) -> list[int]:
    """Sample from each row's `width` most likely tokens; rows that keep more tokens are sampled again from all. width:
    at least each row's top_k, whose tokens' sum top_p is a share of."""
    width = min(width, scores.shape[-1])
    best, ids = _most_likely(scores, width)
    temperatures = torch.tensor([[_temperature(row)] for row in rows], dtype=torch.float64)
    weights = ((best - best[:, :1]).double() / temperatures).exp()
    totals = torch.zeros(len(rows), 1, dtype=torch.float64)
    for r, row in enumerate(rows):
        if not 0 < row.sampling.top_k <= width:  # then top_p is a share of all tokens
            totals[r] = 1 / float(_probs(scores[r : r + 1], best[r, 0], row).amax())
    kept, reaches_on = _truncate(weights, totals, rows)
    places = torch.tensor(_invert_cdf(weights * kept, rows))
    tokens: list[int] = ids.gather(-1, places[:, None])[:, 0].tolist()
    if width < scores.shape[-1] and (again := torch.nonzero(reaches_on)[:, 0].tolist()):
        redrawn = _sample_truncated(scores[again], [rows[r] for r in again], scores.shape[-1])
        for r, token in zip(again, redrawn, strict=True):
            tokens[r] = token
    return tokens


def _most_likely(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Each row's `width` largest scores in descending order, and their ids. Of equal scores at the end, any may be
    taken, as by torch.topk. The largest scores lie in the `width` blocks with the largest maxima."""
    rows, vocab = scores.shape
    num_blocks = -(-vocab // _BLOCK_TOKENS)
    if num_blocks < 2 * width:
        return torch.topk(scores, width)
    padded = functional.pad(scores, (0, num_blocks * _BLOCK_TOKENS - vocab), value=-torch.inf)
    blocks = padded.view(rows, num_blocks, _BLOCK_TOKENS)
    chosen = torch.topk(blocks.amax(-1), width).indices
    candidates = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK_TOKENS)).flatten(1)
    best, places = torch.topk(candidates, width)
    return best, chosen.gather(1, places // _BLOCK_TOKENS) * _BLOCK_TOKENS + places % _BLOCK_TOKENS


def _truncate(weights: Tensor, totals: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Truncate by top_k, top_p and min_p. weights: float64 [R, N], descending, probabilities in units of the first;
    totals: [R, 1], their sum over the whole vocabulary, read for rows without top_k, or with one beyond N.

    Returns (mask [R, N] of the tokens kept, mask [R] of the rows that may keep tokens beyond the Nth). The most likely
    token is always kept.
    """
    samplings = [row.sampling for row in rows]
    num_weights = weights.shape[-1]
    top_k = torch.tensor([s.top_k or 2**62 for s in samplings])[:, None]
    top_p = torch.tensor([s.top_p if s.top_p < 1.0 else math.inf for s in samplings], dtype=torch.float64)[:, None]
    min_p = torch.tensor([s.min_p for s in samplings], dtype=torch.float64)[:, None]
    kept = torch.arange(num_weights) < top_k
    mass = torch.where(top_k <= num_weights, (weights * kept).sum(-1, keepdim=True), totals)
    before = weights.cumsum(-1) - weights
    kept &= (before < top_p * mass) & (weights >= min_p)
    kept[:, 0] = True
    return kept, kept[:, -1] & (top_k[:, 0] > num_weights)


def _invert_cdf(weights: Tensor, rows: Sequence[Row]) -> list[int]:
    """Return per row the first index at which the cumulative sum of the weights [R, N] exceeds the row's uniform
    number, scaled by the row's total."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    marks = torch.tensor([row.uniform() for row in rows], dtype=torch.float64) * sums[:, -1]
    places = torch.searchsorted(sums, marks[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
    for r in torch.nonzero(weights.gather(-1, places[:, None])[:, 0] == 0)[:, 0].tolist():
        places[r] = torch.nonzero(weights[r])[-1, 0]  # rounding went past the last token of nonzero probability
    return places.tolist()
