"""What one step computes. Never: who gets into it, tensors."""

from __future__ import annotations

import msgspec

from proa.engine.scheduling.request import NO_SLOT, Request


class StepItem(msgspec.Struct, frozen=True):
    """Compute tokens[start : start + num_tokens] of `request`; all earlier ones are in its pages already.

    `samples`: these reach the end of its tokens, so the step yields 1..1+lookahead_tokens new ones. `copy_from`: before
    that its state slot becomes a copy of this one; `copy_to`: behind that this one becomes a copy of its state slot.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    copy_from: int = NO_SLOT
    copy_to: int = NO_SLOT


class StepPlan(msgspec.Struct, frozen=True):
    """One step: decodes first, then prefill chunks. Page tables of the requests stand still until commit.

    All that copies read of other requests they read before anything of the step is written.
    """

    items: tuple[StepItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)
