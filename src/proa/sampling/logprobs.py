"""Log-probabilities of chosen and best tokens, from the model's own distribution. Never: sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proa.types import TokenLogprob


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """logits float32 [vocab], before any penalty or temperature -> of `token` and of the `top` best tokens."""
    logprobs = torch.log_softmax(logits, -1)
    values, ids = logprobs.topk(min(top, len(logits)))
    best = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), best)


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The same of several rows, float32 [R, vocab], and a token of each."""
    return [token_logprob(scores, token, top) for scores, token in zip(logits, tokens, strict=True)]
