"""What a step is to an executor: spans of sequences, and the most that they may be. Never: requests, devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor


class Span(msgspec.Struct, frozen=True):
    """A sequence's part of a step: `tokens` at positions from `start` on; `pages` hold all of it."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    num_prompt: int


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
