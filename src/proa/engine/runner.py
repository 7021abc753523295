"""Run one planned step: tensors in, tokens out. Belongs here: the forward pass and sampling. Never: scheduling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from proa.engine.executor import Executor, Span
from proa.engine.request import Request
from proa.engine.scheduler import StepItem, StepPlan
from proa.sampling.logprobs import token_logprob
from proa.sampling.rows import Row
from proa.sampling.sampler import sample
from proa.types import TokenLogprob

# Rows of logits made at once for prompt log-probabilities: bounds them at 64 x vocab float32.
PROMPT_LOGITS_ROWS = 64


@dataclass
class StepOutput:
    """By request id. A request whose logits were not finite is in `broken` and has no token."""

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)


class Runner:
    """Steps of the scheduler, on an executor."""

    def __init__(self, executor: Executor, page_tokens: int) -> None:
        self.executor = executor
        self.page_tokens = page_tokens
        self.ropes = {block.mixer.rope for block in executor.spec.blocks}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Compute every item's rows, write their KV, sample where the plan says so."""
        items = plan.items
        hidden = self.executor.forward([_span(item) for item in items])
        out = StepOutput()
        ends = list(accumulate(item.num_tokens for item in items))
        sampled = [(item, end - 1) for item, end in zip(items, ends, strict=True) if item.samples]
        if sampled:
            logits = self.executor.logits(_rows(hidden, [row for _, row in sampled]))
            self._sample([item.request for item, _ in sampled], logits, out)
        for item, end in zip(items, ends, strict=True):
            if item.request.sampling.prompt_logprobs is not None and not item.request.num_generated:
                self._score_prompt(item, hidden[end - item.num_tokens : end], out)
        return out

    def _sample(self, requests: Sequence[Request], logits: Tensor, out: StepOutput) -> None:
        finite = [math.isfinite(total) for total in logits.sum(-1).tolist()]  # not a number, or infinite, if any is
        out.broken.update(r.id for r, ok in zip(requests, finite, strict=True) if not ok)
        good = [i for i, ok in enumerate(finite) if ok]
        if not good:
            return
        rows = [Row(r.sampling, r.tokens, r.num_prompt) for r in (requests[i] for i in good)]
        chosen = logits if len(good) == len(finite) else logits[good]
        for i, token in zip(good, sample(chosen, rows), strict=True):
            request = requests[i]
            out.tokens[request.id] = token
            if request.sampling.logprobs is not None:
                out.logprobs[request.id] = token_logprob(logits[i], token, request.sampling.logprobs)

    def _score_prompt(self, item: StepItem, hidden: Tensor, out: StepOutput) -> None:
        """Log-probabilities of the prompt tokens that this chunk's rows predict."""
        request, top = item.request, item.request.sampling.prompt_logprobs or 0
        last = min(item.start + item.num_tokens, request.num_prompt - 1)
        scored = out.prompt_logprobs.setdefault(request.id, [])
        for first in range(item.start, last, PROMPT_LOGITS_ROWS):
            rows = slice(first - item.start, min(first + PROMPT_LOGITS_ROWS, last) - item.start)
            for i, scores in enumerate(self.executor.logits(hidden[rows])):
                scored.append(token_logprob(scores, request.tokens[first + i + 1], top))


def _span(item: StepItem) -> Span:
    request = item.request
    return Span(
        request.tokens[item.start : item.start + item.num_tokens], item.start, request.pages, request.num_prompt
    )


def _rows(hidden: Tensor, rows: list[int]) -> Tensor:
    """hidden[rows]; a view where they follow one another, as in every step that only decodes."""
    first, end = rows[0], rows[-1] + 1
    return hidden[first:end] if end - first == len(rows) else hidden[rows]
