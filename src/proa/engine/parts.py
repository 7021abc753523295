"""A step on its way through a model's blocks, some at a time. Never: when, for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from proa.engine.spans import Span
from proa.layers.decoder import Decoder
from proa.layers.step import Step


class Parts:
    def __init__(self, model: Decoder, sequences: Sequence[Span], tokens: Tensor, step: Step) -> None:
        self.sequences = sequences
        self.hidden = torch.empty(0)  # [T, hidden] behind the blocks that are done
        self._behind, self._left = model.by_blocks(tokens, step), len(model.blocks)

    @property
    def done(self) -> bool:
        return self._left == 0

    def advance(self, blocks: int) -> int:
        """So many more blocks, or those that are left; how many that were."""
        count = min(blocks, self._left)
        for _ in range(count):
            self.hidden = next(self._behind)
        self._left -= count
        return count


_P = TypeVar("_P")


def begun(parts: _P | None) -> _P:
    """Raises ValueError where nothing was."""
    if parts is None:
        raise ValueError("no step is computed in parts")
    return parts


def not_finite(hidden: Tensor) -> list[int]:
    """Rows of hidden [T, hidden] that have values which are not: these stay in the residual stream."""
    rows: list[int] = (~hidden.isfinite().all(1)).nonzero().flatten().tolist()
    return rows
