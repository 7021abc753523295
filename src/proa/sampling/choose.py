"""Samples the next token of each row, with its logprobs, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from proa.sampling.logprobs import token_logprob
from proa.sampling.rows import Row
from proa.sampling.sampler import sample
from proa.types import TokenLogprob


class SampledToken(msgspec.Struct):
    """One row's result. token: -1 if the row's logits are non-finite. late: the device has already launched the next
    step with another token for this row."""

    token: int
    logprob: TokenLogprob | None = None
    late: bool = False


def choose(argmax: Sequence[int], rows: Sequence[Row], logits: Tensor) -> list[SampledToken]:
    """Sample one token per row and compute its logprobs if requested.

    argmax: token id per row, -1 if a logit of the row is non-finite. logits: float32 [R, vocab]; not read if every row
    takes its argmax and wants no logprobs, because each torch call between two steps takes tens of microseconds.
    """
    sampled, drawn, scored = [], [], []
    for i in range(len(rows)):
        token, row = argmax[i], rows[i]
        sampled.append(SampledToken(token))
        if token >= 0 and not row.keeps(token):
            drawn.append(i)
        if token >= 0 and row.sampling.logprobs is not None:
            scored.append(i)
    if drawn or scored:
        _read_logits(sampled, rows, drawn, scored, logits)
    return sampled


@torch.inference_mode()
def _read_logits(
    sampled: Sequence[SampledToken], rows: Sequence[Row], drawn: Sequence[int], scored: Sequence[int], logits: Tensor
) -> None:
    """Fill in the tokens of the rows `drawn` and the logprobs of the rows `scored`."""
    if drawn:
        chosen = logits if len(drawn) == len(logits) else logits[drawn]
        for i, token in zip(drawn, sample(chosen, [rows[i] for i in drawn]), strict=True):
            sampled[i].token = token
    for i in scored:
        sampled[i].logprob = token_logprob(logits[i], sampled[i].token, rows[i].sampling.logprobs or 0)
