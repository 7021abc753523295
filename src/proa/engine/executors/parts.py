"""Computes a step a few blocks at a time. Never: choosing how many."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from proa.layers.decoder import Decoder
from proa.layers.step import Step


class BlockByBlock:
    """A forward pass of `model` that can pause after any block."""

    def __init__(self, model: Decoder, tokens: Tensor, step: Step, kept: Mapping[int, Tensor]) -> None:
        """kept: block -> buffer that its output is copied to."""
        self.hidden = tokens.new_empty(0)  # [T, hidden] after the last computed block
        self._outputs, self._left = enumerate(model.by_blocks(tokens, step)), len(model.blocks)
        self._kept = kept

    @property
    def done(self) -> bool:
        return self._left == 0

    def advance(self, blocks: int) -> int:
        """Compute up to `blocks` more blocks. Returns how many were computed."""
        count = min(blocks, self._left)
        for _ in range(count):
            block, self.hidden = next(self._outputs)
            if block in self._kept:
                self._kept[block][: len(self.hidden)].copy_(self.hidden)
        self._left -= count
        return count


def non_finite_rows(hidden: Tensor) -> list[int]:
    """Rows of hidden [T, hidden] with NaN or infinity, which stay in the residual stream once they are there."""
    rows: list[int] = (~hidden.isfinite().all(1)).nonzero().flatten().tolist()
    return rows
