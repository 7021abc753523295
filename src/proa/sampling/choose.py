"""The next token of each row and what is to be said of it, on the CPU. Never: the model, requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from proa.sampling.logprobs import token_logprob
from proa.sampling.rows import Row
from proa.sampling.sampler import sample
from proa.types import TokenLogprob


class Choice(msgspec.Struct):
    """token: -1 where the row's logits are not finite. late: a device that has gone on did so with another token."""

    token: int
    logprob: TokenLogprob | None = None
    late: bool = False


@torch.inference_mode()
def choose(best: Sequence[int], rows: Sequence[Row], logits: Tensor) -> list[Choice]:
    """best: of each row the largest logit's id, -1 where any is not finite; logits float32 [R, vocab]."""
    choices = [Choice(token) for token in best]
    drawn = [i for i, token in enumerate(best) if token >= 0 and not rows[i].takes_best]
    if drawn:
        chosen = logits if len(drawn) == len(logits) else logits[drawn]
        for i, token in zip(drawn, sample(chosen, [rows[i] for i in drawn]), strict=True):
            choices[i].token = token
    for i, row in enumerate(rows):
        if row.sampling.logprobs is not None and best[i] >= 0:
            choices[i].logprob = token_logprob(logits[i], choices[i].token, row.sampling.logprobs)
    return choices
