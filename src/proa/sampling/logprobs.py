"""Logprobs of sampled and most likely tokens, from the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proa.types import TokenLogprob


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Compute the logprobs of `token` and of the `top` most likely tokens. logits: float32 [vocab], before penalties
    and temperature."""
    logprobs = torch.log_softmax(logits, -1)
    values, ids = logprobs.topk(min(top, len(logits)))
    best = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), best)


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Compute token_logprob for each row of logits, float32 [R, vocab], with one token per row."""
    return [token_logprob(scores, token, top) for scores, token in zip(logits, tokens, strict=True)]
