"""The decoder: embedding, blocks, final norm, head, and the only residual loop. Never: mixer details, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from torch import Tensor

from proa.layers.build import build_ffn, build_mixer
from proa.layers.moe import Moe
from proa.layers.norm import RmsNorm
from proa.layers.parameters import prefixed
from proa.layers.step import Step
from proa.models import spec
from proa.ops.table import LayerCache, Ops, Parameters, Unsummed


class Block:
    """x += mixer(norm1 x); x += ffn(norm2 x). The last residual add is deferred and fused with the next norm."""

    def __init__(self, s: spec.Block, model: spec.Model, ops: Ops) -> None:
        self._ops = ops
        self.norm1 = RmsNorm(model, ops)
        self.norm2 = RmsNorm(model, ops)
        self.mixer = build_mixer(s.mixer, model, ops)
        self.ffn = build_ffn(s.ffn, ops)

    def __call__(
        self, x: Tensor, y: Tensor | Unsummed | None, step: Step, cache: LayerCache
    ) -> tuple[Tensor, Tensor | Unsummed]:
        """Take the residual stream as x + y (y None: x alone) and return the next block's (x, y)."""
        self._ops.new_block()
        x, normed = self.norm1.of_sum(x, y)
        return self.ffn(x, self.mixer(normed, step, cache), self.norm2.norm, step.batch.slots)

    def parameters(self) -> Parameters:
        for name, part in (
            ("norm1", self.norm1), ("norm2", self.norm2), ("mixer", self.mixer), ("ffn", self.ffn)
        ):  # fmt: skip
            yield from prefixed(name, part.parameters())


class Decoder:
    """A language model: token ids -> hidden states -> logits. Weights are uninitialised until loaded."""

    def __init__(self, model: spec.Model, ops: Ops) -> None:
        self.spec = model
        self.argmax, self._add, self._join, self._gather = ops.argmax, ops.add, ops.join, ops.gather
        self.embed = ops.maps.embedding(model.vocab, model.hidden, model.tied)
        self.blocks = [Block(block, model, ops) for block in model.blocks]
        with_experts = [(block.ffn, block.norm2.norm) for block in self.blocks if isinstance(block.ffn, Moe)]
        for (ffn, _), following in pairwise(with_experts):
            ffn.is_followed_by(*following)
        self.norm = RmsNorm(model, ops)
        self.head = None if model.tied else ops.maps.head(model.vocab, model.hidden)

    def __call__(self, tokens: Tensor, step: Step, kept: Mapping[int, Tensor] | None = None) -> Tensor:
        """tokens int64 [T] -> hidden states after the last block [T, hidden]; fills the caches.

        kept: by block, where its output is copied to: tensors of T rows or more (draft heads read them).
        """
        x, y = self._join(self.embed(tokens)), None
        for i, (block, cache) in enumerate(zip(self.blocks, step.caches, strict=True)):
            x, y = block(x, y, step, cache)
            if kept is not None and i in kept:
                x, y = self._sum(x, y), None
                kept[i][: len(x)].copy_(x)
        return x if y is None else self._sum(x, y)

    def by_blocks(self, tokens: Tensor, step: Step) -> Iterator[Tensor]:
        """Compute one block at a time and yield the residual stream after each; the last one is the result. The stream
        is kept in tensors of its own, so that other steps may run in between."""
        x = self._join(self.embed(tokens))
        for block, cache in zip(self.blocks, step.caches, strict=True):
            x = self._sum(*block(x, None, step, cache))
            yield x

    def _sum(self, x: Tensor, y: Tensor | Unsummed) -> Tensor:
        return self._add(x, y) if isinstance(y, Tensor) else y.add(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        x = self.norm(hidden)
        return self._gather(self.embed.logits(x) if self.head is None else self.head(x))

    def parameters(self) -> Parameters:
        """Every parameter's name, as in models/spec.py, and its target."""
        yield from prefixed("embed", self.embed.parameters())
        for i, block in enumerate(self.blocks):
            yield from prefixed(f"blocks.{i}", block.parameters())
        yield from prefixed("norm", self.norm.parameters())
        if self.head is not None:
            yield from self.head.parameters()
