"""Run one planned step: tokens in, tokens out. Belongs here: the forward pass and sampling. Never: scheduling."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from proa.engine.clock import Stage
from proa.engine.executor import Executor
from proa.engine.request import Request
from proa.engine.scheduler import StepItem, StepPlan
from proa.engine.spans import PROMPT_LOGITS_ROWS, Span
from proa.sampling.logprobs import token_logprob
from proa.sampling.rows import Row
from proa.types import TokenLogprob


class StepOutput(msgspec.Struct):
    """By request id. A request whose values were not finite is in `broken`, with the reason, and has no token."""

    tokens: dict[str, int] = {}
    logprobs: dict[str, TokenLogprob] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    broken: dict[str, str] = {}


class Runner:
    """Steps of the scheduler, on an executor."""

    def __init__(self, executor: Executor, page_tokens: int) -> None:
        self.executor = executor
        self.page_tokens = page_tokens
        self.ropes = executor.spec.ropes

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute every item's rows, write their KV, sample where the plan says so."""
        self.executor.forward([_span(item) for item in plan.items])
        out = StepOutput()
        sampled: list[Request] = []
        rows: list[int] = []
        end = 0
        for item in plan.items:
            end += item.num_tokens
            if item.samples:
                sampled.append(item.request)
                rows.append(end - 1)
        if sampled:
            self._sample(sampled, rows, out)
        for place, why in self.executor.broken().items():
            request_id = plan.items[place].request.id
            out.broken[request_id] = why
            out.tokens.pop(request_id, None)
        end = 0
        for item in plan.items:
            end += item.num_tokens
            if item.request.sampling.prompt_logprobs is not None and not item.request.num_generated:
                self._score_prompt(item, end - item.num_tokens, out)
        self.executor.clock.lap(Stage.SAMPLE)
        return out

    def _sample(self, requests: Sequence[Request], ends: Sequence[int], out: StepOutput) -> None:
        rows = [Row(request.sampling, request.tokens, request.num_prompt, request.id) for request in requests]
        for request, choice in zip(requests, self.executor.sample(ends, rows), strict=True):
            if choice.token < 0:
                out.broken[request.id] = "The model's logits were not finite."
                continue
            out.tokens[request.id] = choice.token
            if choice.logprob is not None:
                out.logprobs[request.id] = choice.logprob

    @torch.inference_mode()
    def _score_prompt(self, item: StepItem, row: int, out: StepOutput) -> None:
        """Log-probabilities of the prompt tokens that this chunk's rows, from `row` on, predict."""
        request, top = item.request, item.request.sampling.prompt_logprobs or 0
        last = min(item.start + item.num_tokens, request.num_prompt - 1)
        scored = out.prompt_logprobs.setdefault(request.id, [])
        for first in range(item.start, last, PROMPT_LOGITS_ROWS):
            begin, end = first - item.start + row, min(first + PROMPT_LOGITS_ROWS, last) - item.start + row
            self.executor.score(range(begin, end))
            for i, scores in enumerate(self.executor.logits):
                scored.append(token_logprob(scores, request.tokens[first + i + 1], top))


def _span(item: StepItem) -> Span:
    request = item.request
    return Span(
        request.tokens[item.start : item.start + item.num_tokens],
        item.start,
        request.pages,
        request.num_prompt,
        request.state_slot,
    )
