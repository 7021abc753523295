"""A step computed a few blocks at a time. Never: when, how many."""

from __future__ import annotations

from torch import Tensor

from proa.engine.executors.batch import StepBatch
from proa.layers.decoder import Decoder
from proa.layers.step import Step


class BlockByBlock:
    """A forward pass of `model` that stops behind any block."""

    def __init__(self, model: Decoder, batch: StepBatch, tokens: Tensor, step: Step) -> None:
        self.batch = batch
        self.hidden = tokens.new_empty(0)  # [T, hidden] behind the last computed block
        self._blocks, self._left = model.by_blocks(tokens, step), len(model.blocks)

    @property
    def done(self) -> bool:
        return self._left == 0

    def advance(self, blocks: int) -> int:
        """Compute up to `blocks` more. Returns how many were left to compute."""
        count = min(blocks, self._left)
        for _ in range(count):
            self.hidden = next(self._blocks)
        self._left -= count
        return count


def non_finite_rows(hidden: Tensor) -> list[int]:
    """Rows of hidden [T, hidden] with NaN or infinity, which stay in the residual stream once they are there."""
    rows: list[int] = (~hidden.isfinite().all(1)).nonzero().flatten().tolist()
    return rows
