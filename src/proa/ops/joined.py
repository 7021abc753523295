"""Ops of one of several ranks (models/ranks.py), composed of a single rank's ops. Never: communication, dividing a
model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proa.ops.choose import composed_choose
from proa.ops.table import Embedding, Gather, Join, Norm, Ops, Parameters, Route


@dataclass(frozen=True)
class Peers:
    """A rank's connections to the others of its stage. first_token: number of its first row of the vocabulary."""

    join: Join
    gather: Gather
    first_token: int = 0


def joined(ops: Ops, route: Route, peers: Peers) -> Ops:
    """Ops that sum over the ranks what they add to the residual stream, before they add it."""

    def add(x: Tensor, y: Tensor) -> Tensor:
        return ops.add(x, peers.join(y))

    def add_norm(x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return ops.add_norm(x, peers.join(y), norm)

    choose = composed_choose(ops.rms_norm, add_norm, route)
    return replace(ops, join=peers.join, gather=peers.gather, add=add, add_norm=add_norm, choose=choose)


class EmbeddingPart:
    """Implements Embedding by a rank's `rows` rows of the vocabulary, the first of them for token `first`: other
    tokens' embeddings are zeros."""

    def __init__(self, of: Embedding, first: int, rows: int) -> None:
        self._of, self._first, self._rows = of, first, rows

    def __call__(self, tokens: Tensor) -> Tensor:
        here = (tokens >= self._first) & (tokens < self._first + self._rows)
        return self._of(torch.where(here, tokens - self._first, 0)) * here[:, None]

    def logits(self, x: Tensor) -> Tensor:
        return self._of.logits(x)

    def parameters(self) -> Parameters:
        return self._of.parameters()
