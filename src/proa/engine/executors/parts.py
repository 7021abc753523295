"""Computes a step a few blocks at a time. Never: choosing how many."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from proa.engine.executors.batch import StepBatch
from proa.layers.decoder import Decoder
from proa.layers.step import Step


class BlockByBlock:
    """A forward pass of `model` that can pause after any block."""

    def __init__(
        self, model: Decoder, batch: StepBatch, tokens: Tensor, step: Step, kept: Mapping[int, Tensor]
    ) -> None:  # fmt: skip
        """kept: block -> buffer that its output is copied to."""
        self.batch, self._kept, self._num_blocks = batch, kept, len(model.blocks)
        self.hidden = tokens.new_empty(0)  # [T, hidden] after the last computed block
        self._blocks, self._left = model.by_blocks(tokens, step), len(model.blocks)

    @property
    def done(self) -> bool:
        return self._left == 0

    def advance(self, blocks: int) -> int:
        """Compute up to `blocks` more blocks. Returns how many were computed."""
        count = min(blocks, self._left)
        for _ in range(count):
            self.hidden = next(self._blocks)
            place = self._kept.get(self._num_blocks - self._left)
            if place is not None:
                place[: len(self.hidden)].copy_(self.hidden)
            self._left -= 1
        return count


def non_finite_rows(hidden: Tensor) -> list[int]:
    """Rows of hidden [T, hidden] with NaN or infinity, which stay in the residual stream once they are there."""
    rows: list[int] = (~hidden.isfinite().all(1)).nonzero().flatten().tolist()
    return rows
