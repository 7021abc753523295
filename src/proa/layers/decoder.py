"""The decoder: embedding, blocks, final norm, head, and the only residual loop. Never: mixer details, sampling."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from itertools import pairwise
from typing import TypeVar

from torch import Tensor

from proa.layers.build import build_ffn, build_mixer
from proa.layers.moe import Moe
from proa.layers.norm import RmsNorm
from proa.layers.parameters import prefixed
from proa.layers.step import Step
from proa.models import spec
from proa.ops.caches import LayerCache
from proa.ops.table import Ops, Parameters, Unsummed


class Block:
    """x += mixer(norm1 x); x += ffn(norm2 x), each times the model's residual factor; one of the two may be missing.
    The last residual add is deferred and fused with the next norm."""

    def __init__(self, s: spec.Block, model: spec.Model, ops: Ops, number: int) -> None:
        self._ops, self._factor = ops, model.residual_factor
        self.norm1 = RmsNorm(model, ops)
        self.norm2 = RmsNorm(model, ops)
        self.mixer = build_mixer(s.mixer, model, ops) if s.mixer else None
        self.ffn = build_ffn(s.ffn, ops, number) if s.ffn else None

    def __call__(
        self, x: Tensor, y: Tensor | Unsummed | None, step: Step, caches: tuple[LayerCache, ...]
    ) -> tuple[Tensor, Tensor | Unsummed | None]:
        """Take the residual stream as x + y (y None: x alone) and return the next block's (x, y)."""
        parts = self.parts(x, y, step, caches)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                result: tuple[Tensor, Tensor | Unsummed | None] = end.value
                return result

    def parts(
        self, x: Tensor, y: Tensor | Unsummed | None, step: Step, caches: tuple[LayerCache, ...]
    ) -> Generator[None, None, tuple[Tensor, Tensor | Unsummed | None]]:
        """Compute the block as when it is called, with a yield wherever a prefill step may pause within it."""
        self._ops.new_block()
        if self.mixer is not None:
            x, normed = self.norm1.of_sum(x, y)
            y = _scaled(self._ops, self.mixer(normed, step, caches), self._factor)
            del normed  # the FFN may pause
        if self.ffn is not None:
            x, y = yield from self.ffn.parts(x, y, self.norm2, step.batch.slots)
            y = _scaled(self._ops, y, self._factor)
        return x, y

    def parameters(self) -> Parameters:
        if self.mixer is not None:
            yield from prefixed("norm1", self.norm1.parameters())
            yield from prefixed("mixer", self.mixer.parameters())
        if self.ffn is not None:
            yield from prefixed("norm2", self.norm2.parameters())
            yield from prefixed("ffn", self.ffn.parameters())


T = TypeVar("T", Tensor, Tensor | Unsummed)


def _scaled(ops: Ops, y: T, factor: float) -> T:
    """y * factor; a pending sum of experts is multiplied when it is added."""
    if factor == 1.0:
        return y
    return ops.scale(y, factor) if isinstance(y, Tensor) else y.scaled(factor)


class Decoder:
    """A language model: token ids -> hidden states -> logits. Weights are uninitialised until loaded."""

    def __init__(self, model: spec.Model, ops: Ops) -> None:
        self.spec, self._ops = model, ops
        self.argmax, self._add, self._join, self._gather = ops.argmax, ops.add, ops.join, ops.gather
        self.embed = ops.maps.embedding(model.vocab, model.hidden, model.tied)
        self.blocks = [Block(block, model, ops, number) for number, block in enumerate(model.blocks)]
        with_experts = [(block.ffn, block.norm2) for block in self.blocks if isinstance(block.ffn, Moe)]
        for (ffn, _), following in pairwise(with_experts):
            ffn.is_followed_by(*following)
        self.norm = RmsNorm(model, ops)
        self.head = None if model.tied else ops.maps.head(model.vocab, model.hidden)

    def __call__(self, tokens: Tensor, step: Step, kept: Mapping[int, Tensor] | None = None) -> Tensor:
        """tokens int64 [T] -> hidden states after the last block [T, hidden]; fills the caches. Instead of tokens: rows
        of embeddings [T, hidden] in the activations' dtype, which may be overwritten and get no embedding factor.

        kept: by block, where its output is copied to: tensors of T rows or more (draft heads read them).
        """
        x, y = self.embedded(tokens), None
        for i, (block, caches) in enumerate(zip(self.blocks, step.caches, strict=True)):
            x, y = block(x, y, step, caches)
            if kept is not None and i in kept:
                x, y = self._sum(x, y), None
                kept[i][: len(x)].copy_(x)
        return self._sum(x, y)

    def by_parts(self, tokens: Tensor, step: Step) -> Iterator[Tensor | None]:
        """Compute the model in parts. Yields the residual stream after each block, the last one of which is the result,
        and None within a block. What the next part needs is kept in its own tensors, so that other steps may run in
        between."""
        x = self.embedded(tokens)
        for block, caches in zip(self.blocks, step.caches, strict=True):
            # What is summed up is not kept in a variable: it would live until this chunk goes on.
            x = self._sum(*(yield from block.parts(x, None, step, caches)))
            yield x

    def block(self, number: int, x: Tensor, step: Step) -> Tensor:
        """The residual stream x [T, hidden] after this block, without pauses in it."""
        return self._sum(*self.blocks[number](x, None, step, step.caches[number]))

    def by_blocks(self, tokens: Tensor, step: Step) -> Iterator[Tensor]:
        """Compute one block at a time and yield the residual stream after each: `by_parts` without pauses in a
        block."""
        return (x for x in self.by_parts(tokens, step) if x is not None)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The residual stream before the first block. tokens: see `__call__`."""
        if tokens.dim() == 2:
            return tokens
        return _scaled(self._ops, self._join(self.embed(tokens)), self.spec.embedding_factor)

    def _sum(self, x: Tensor, y: Tensor | Unsummed | None) -> Tensor:
        if y is None:
            return x
        return self._add(x, y) if isinstance(y, Tensor) else y.add(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        x = _scaled(self._ops, self.norm(hidden), self.spec.logits_factor)
        return self._gather(self.embed.logits(x) if self.head is None else self.head(x))

    def parameters(self) -> Parameters:
        """Every parameter's name, as in models/spec.py, and its target."""
        yield from prefixed("embed", self.embed.parameters())
        for i, block in enumerate(self.blocks):
            yield from prefixed(f"blocks.{i}", block.parameters())
        yield from prefixed("norm", self.norm.parameters())
        if self.head is not None:
            yield from self.head.parameters()
