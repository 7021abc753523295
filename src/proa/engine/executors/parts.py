"""Computes a step a few blocks at a time, each block for all chunks of the step before the next block. Never: choosing
how many, cutting steps into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from proa.layers.decoder import Decoder
from proa.layers.step import Step


@dataclass(frozen=True)
class Chunk:
    """Some rows of a step in parts, `first_row` on, and the model's arguments for them."""

    first_row: int
    tokens: Tensor
    step: Step


class Parts(Protocol):
    """A step in parts under way. A unit is a block, or one of the groups of its experts, for one chunk."""

    @property
    def done(self) -> bool: ...

    @property
    def done_share(self) -> float: ...

    @property
    def hidden(self) -> Sequence[Tensor]:
        """[T, hidden] of the whole step, once it is done, in pieces: as one tensor it would take its memory twice."""

    def advance(self, units: int) -> int:
        """Launch up to `units` more units. Returns how many were launched."""


class BlockByBlock:
    """A forward pass of `model` that can pause after any block of any chunk, and between the groups of a block's
    experts. A block, or a group, is computed for all chunks before the next one, in the order of the chunks: one may
    read the KV and the states that the chunks before it have written. Implements Parts."""

    def __init__(
        self, model: Decoder, chunks: Sequence[Chunk], kept: Mapping[int, Tensor],
        launching: Callable[[int], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """kept: block -> buffer that its output is copied to. launching: of a chunk's first row, the context of its
        launches."""
        self._chunks = chunks
        self._outputs = [_numbered(model.by_parts(chunk.tokens, chunk.step)) for chunk in chunks]
        self._hidden = [chunk.tokens.new_empty(0) for chunk in chunks]  # [T, hidden] each, after its last block
        self._units = self._left = len(chunks) * len(model.blocks)  # ends of blocks: in all, and to come
        self._next = 0
        self._kept, self._launching = kept, launching

    @property
    def first_row(self) -> int:
        """The first row of the chunk that is computed now, or next."""
        return self._chunks[self._next].first_row

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def done_share(self) -> float:
        return 1.0 - self._left / self._units

    @property
    def hidden(self) -> Sequence[Tensor]:
        """[T, hidden] of the whole step, chunk by chunk, after the last block that was computed for all of them."""
        return self._hidden

    def advance(self, units: int) -> int:
        """Compute up to `units` more units: for one chunk, a block or one of the groups of its experts. Returns how
        many were computed."""
        count = 0
        while count < units and self._left:
            chunk = self._next
            first = self._chunks[chunk].first_row
            with self._launching(first):
                block, hidden = next(self._outputs[chunk])
            count += 1
            self._next = (chunk + 1) % len(self._chunks)
            if hidden is None:
                continue
            if block in self._kept:
                self._kept[block][first : first + len(hidden)].copy_(hidden)
            self._hidden[chunk] = hidden
            self._left -= 1
        return count


def _numbered(parts: Iterator[Tensor | None]) -> Iterator[tuple[int, Tensor | None]]:
    """Number what Decoder.by_parts yields by blocks."""
    block = 0
    for hidden in parts:
        yield block, hidden
        block += hidden is not None


def non_finite_rows(pieces: Sequence[Tensor], count: int) -> list[int]:
    """The first `count` rows of hidden states [T, hidden], in pieces, that have NaN or infinity, which stay in the
    residual stream once they are there."""
    greatest, left = list[Tensor](), count
    for piece in pieces:
        greatest.append(torch.linalg.vector_norm(piece[: max(0, left)], torch.inf, dim=1))  # propagates NaN
        left -= len(piece)
    rows: list[int] = (~torch.cat([of.cpu() for of in greatest]).isfinite()).nonzero().flatten().tolist()
    return rows
