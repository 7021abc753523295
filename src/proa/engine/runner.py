"""Run one planned step: tensors in, tokens out. Belongs here: the forward pass and sampling. Never: scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proa.cache.pool import allocate_pool
from proa.engine.request import Request
from proa.engine.scheduler import StepItem, StepPlan
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.models.spec import Rope
from proa.ops.table import batch_of
from proa.sampling.logprobs import token_logprob
from proa.sampling.rows import Row
from proa.sampling.sampler import sample
from proa.types import TokenLogprob

# Steps up to this many tokens are bound by reading weights, longer ones by arithmetic: each has its thread count.
FEW_TOKENS = 8
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
    """Owns the model and its KV pool."""

    def __init__(self, model: Decoder, num_pages: int, page_tokens: int, dtype: torch.dtype) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.caches = allocate_pool(model.spec, num_pages, page_tokens, dtype)
        self.ropes = {block.mixer.rope for block in model.spec.blocks}
        self.decode_threads = self.prefill_threads = torch.get_num_threads()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Compute every item's rows, write their KV, sample where the plan says so."""
        items = plan.items
        torch.set_num_threads(self.decode_threads if plan.num_tokens <= FEW_TOKENS else self.prefill_threads)
        hidden = self.model(self._tokens(items), self._step(items))
        out = StepOutput()
        ends = torch.tensor([item.num_tokens for item in items]).cumsum(0).tolist()
        sampled = [(item, end - 1) for item, end in zip(items, ends, strict=True) if item.samples]
        if sampled:
            logits = self.model.logits(hidden[[row for _, row in sampled]])
            self._sample([item.request for item, _ in sampled], logits, out)
        for item, end in zip(items, ends, strict=True):
            if item.request.sampling.prompt_logprobs is not None and not item.request.num_generated:
                self._score_prompt(item, hidden[end - item.num_tokens : end], out)
        return out

    def _tokens(self, items: Sequence[StepItem]) -> Tensor:
        return torch.tensor([t for i in items for t in i.request.tokens[i.start : i.start + i.num_tokens]])

    def _step(self, items: Sequence[StepItem]) -> Step:
        kv_lens = [item.start + item.num_tokens for item in items]
        batch = batch_of(
            [item.num_tokens for item in items],
            kv_lens,
            [item.request.pages for item in items],
            self.page_tokens,
        )
        positions = torch.cat([torch.arange(i.start, n) for i, n in zip(items, kv_lens, strict=True)])
        prompts = torch.cat([torch.full((i.num_tokens,), i.request.num_prompt) for i in items])
        lengths = torch.maximum(prompts, positions + 1)
        angles: dict[Rope, tuple[Tensor, Tensor]] = {r: cos_sin(r, positions, lengths) for r in self.ropes}
        return Step(batch, angles, self.caches)

    def _sample(self, requests: Sequence[Request], logits: Tensor, out: StepOutput) -> None:
        finite = torch.isfinite(logits).all(-1).tolist()
        out.broken.update(r.id for r, ok in zip(requests, finite, strict=True) if not ok)
        good = [i for i, ok in enumerate(finite) if ok]
        if not good:
            return
        rows = [Row(r.sampling, r.tokens, r.num_prompt) for r in (requests[i] for i in good)]
        for i, token in zip(good, sample(logits[good], rows), strict=True):
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
            for i, scores in enumerate(self.model.logits(hidden[rows])):
                scored.append(token_logprob(scores, request.tokens[first + i + 1], top))
