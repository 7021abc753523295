"""What a step is to an executor: spans of sequences, and the most that they may be. Never: requests, devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from proa.plan.budget import SCORED_ROWS
from proa.plan.plan import Plan


class Span(msgspec.Struct, frozen=True):
    """A sequence's part of a step: `tokens` at positions from `start` on; `pages` hold all of it, and slot `state` what
    recurrent layers know of it. The list of pages may be that of an earlier step, grown; what was in it is the same.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    num_prompt: int
    state: int = 0

    @property
    def in_prompt(self) -> bool:
        """Whether it begins with a token of the prompt, not with one that was generated."""
        return self.start < self.num_prompt


@dataclass(frozen=True)
class StepLimits:
    """What a recorded program is made for."""

    rows: int
    sequences: int
    context_tokens: int
    page_tokens: int
    head_rows: int


def positions_of(sequences: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Of all rows, int64 [T]: the position, and the length that dynamic angles are made for."""
    positions = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in sequences])
    prompts = torch.cat([torch.full((len(s.tokens),), s.num_prompt) for s in sequences])
    return positions, torch.maximum(prompts, positions + 1)


def step_limits(plan: Plan) -> StepLimits:
    return StepLimits(
        rows=plan.max_batch_tokens,
        sequences=plan.max_running,
        context_tokens=plan.context_tokens,
        page_tokens=plan.page_tokens,
        head_rows=max(plan.max_running, SCORED_ROWS),
    )
