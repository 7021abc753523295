"""Logit adjustments before sampling, on the CPU: penalties, logit bias, min_tokens, constraints. Each row is
independent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proa.sampling.rows import Row


def adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Apply each row's adjustments to logits, float32 [R, vocab]. Never writes to the input; returns the input itself
    if no row is adjusted."""
    if not any(row.is_adjusted or row.matcher is not None for row in rows):
        return logits
    out = logits.clone()
    for scores, row in zip(out, rows, strict=True):
        _repetition(scores, row)
        _presence_and_frequency(scores, row)
        for token, bias in row.sampling.logit_bias.items():
            scores[token] += bias
        if row.delays_end:
            scores[[*row.sampling.eos_token_ids, *row.sampling.stop_token_ids]] = -torch.inf
        if (mask := row.mask()) is not None:
            _forbid(scores, mask)
    return out


def _forbid(scores: Tensor, mask: NDArray[np.int32]) -> None:
    """Set the scores of all tokens outside the mask (see Follower.mask) to -inf, in place."""
    allowed = np.unpackbits(mask.view(np.uint8), count=len(scores), bitorder="little")
    scores.masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)


def _repetition(scores: Tensor, row: Row) -> None:
    """Apply the repetition penalty in place: divide positive and multiply negative logits of all tokens seen, prompt
    included (arXiv 1909.05858)."""
    penalty = row.sampling.repetition_penalty
    if penalty == 1.0:
        return
    seen = torch.tensor(sorted(set(row.tokens)))
    values = scores[seen]
    scores[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _presence_and_frequency(scores: Tensor, row: Row) -> None:
    """Apply OpenAI's penalties in place, for generated tokens only: presence once, frequency per occurrence."""
    s = row.sampling
    if not row.num_output or (s.presence_penalty == 0.0 and s.frequency_penalty == 0.0):
        return
    counts = Counter(row.output)
    tokens = torch.tensor(list(counts))
    times = torch.tensor(list(counts.values()), dtype=torch.float32)
    scores[tokens] -= s.presence_penalty + s.frequency_penalty * times
