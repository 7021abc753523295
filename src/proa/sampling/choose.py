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


def choose(best: Sequence[int], rows: Sequence[Row], logits: Tensor) -> list[Choice]:
    """best: of each row the largest logit's id, -1 where any is not finite; logits: float32 [R, vocab], looked at only
    where a row wants anything else: between two steps each call of torch takes tens of microseconds."""
    choices, drawn, told = [], [], []
    for i in range(len(rows)):
        token, row = best[i], rows[i]
        choices.append(Choice(token))
        if token >= 0 and not row.takes_best:
            drawn.append(i)
        if token >= 0 and row.sampling.logprobs is not None:
            told.append(i)
    if drawn or told:
        _look(choices, rows, drawn, told, logits)
    return choices


@torch.inference_mode()
def _look(
    choices: Sequence[Choice], rows: Sequence[Row], drawn: Sequence[int], told: Sequence[int], logits: Tensor
) -> None:
    if drawn:
        chosen = logits if len(drawn) == len(logits) else logits[drawn]
        for i, token in zip(drawn, sample(chosen, [rows[i] for i in drawn]), strict=True):
            choices[i].token = token
    for i in told:
        choices[i].logprob = token_logprob(logits[i], choices[i].token, rows[i].sampling.logprobs or 0)
