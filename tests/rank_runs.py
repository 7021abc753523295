"""Models divided over ranks, each rank a thread with ops in plain torch. Never: tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from threading import Barrier

import torch
from hypothesis import strategies as st
from torch import Tensor

from proa.cache.pool import allocate_pool
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.models.ranks import Mesh, Part, Rank
from proa.models.spec import Block, Model, Moe
from proa.ops.joined import Peers
from proa.ops.reference import reference
from proa.ops.table import batch_of

PAGE_TOKENS = 4
_SECONDS = 60.0  # a rank that waits longer for the others has lost them

Values = Mapping[str, Tensor]


@st.composite
def meshes(draw: st.DrawFn, blocks: int, most_ranks: int = 8) -> Mesh:
    """One to `most_ranks` ranks in stages, with equal or unequal shares."""
    shares, left = [], draw(st.integers(1, most_ranks))
    while left and len(shares) < blocks:
        ranks = draw(st.integers(1, left))
        shares.append(tuple(draw(st.lists(st.integers(1, 5), min_size=ranks, max_size=ranks))))
        left -= ranks
    common = gcd(*map(len, shares))
    groups = draw(st.sampled_from([None, *(n for n in range(1, common + 1) if common % n == 0)]))
    return Mesh(tuple(shares), groups)


def all_experts(model: Model) -> Model:
    """The model with routers that choose all experts: near ties flip otherwise, and change logits at will."""

    def wide(block: Block) -> Block:
        if not isinstance(block.ffn, Moe):
            return block
        groups = block.ffn.router.groups
        router = replace(block.ffn.router, groups=groups and replace(groups, kept=groups.groups))
        return replace(block, ffn=replace(block.ffn, top_k=block.ffn.experts, router=router))

    return replace(model, blocks=tuple(map(wide, model.blocks)))


def random_values(model: Model, seed: int) -> Values:
    """Random parameters; outputs of matrices are about as large as their inputs."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in model.params():
        noise = torch.randn(shape, generator=generator)
        found[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else 0.2 * noise + ("norm" in name)
    return found


def rank_values(rank: Rank, whole: Values) -> Values:
    """A rank's parameters, cut out of the whole model's."""
    return {name: part_of(whole, rank.parts[name], shape) for name, shape in rank.spec.params()}


def part_of(whole: Values, part: Part | None, shape: tuple[int, ...]) -> Tensor:
    if part is None:
        return torch.zeros(shape)
    found = torch.cat([whole[part.name][rows.start : rows.stop] for rows in part.rows])
    return found if part.columns is None else found[..., part.columns.start : part.columns.stop]


class Meeting:
    """The ranks of a stage, which exchange tensors."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._parts = Barrier(ranks, timeout=_SECONDS), [torch.empty(0)] * ranks

    def peers(self, number: int, first_token: int) -> Peers:
        def exchange(merge: Callable[[Sequence[Tensor]], Tensor], part: Tensor) -> Tensor:
            self._parts[number] = part
            self._barrier.wait()
            merged = merge(self._parts)
            self._barrier.wait()
            return merged

        join = partial(exchange, lambda parts: torch.stack(list(parts)).sum(0))
        return Peers(join, partial(exchange, lambda parts: torch.cat(list(parts), -1)), first_token)

    def leave(self) -> None:
        """Have the other ranks fail instead of waiting."""
        self._barrier.abort()


@dataclass(frozen=True)
class Work:
    """Token ids of some sequences, and how many of each are computed in a first step; the others are, one by one."""

    texts: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]

    def steps(self) -> list[list[tuple[int, int, int]]]:
        """Per step (sequence, from, to)."""
        longest = max(map(len, self.texts))
        later = [
            [(i, n + t, n + t + 1) for i, n in enumerate(self.first) if n + t < len(self.texts[i])]
            for t in range(longest - min(self.first))
        ]
        return [[(i, 0, n) for i, n in enumerate(self.first)], *(step for step in later if step)]


def logits(ranks: Sequence[Rank], whole: Values, work: Work) -> list[Tensor]:
    """The logits of each step's rows, as every rank of the last stage has them: float32 [T, vocab]."""
    tokens = [torch.tensor([t for i, a, b in step for t in work.texts[i][a:b]]) for step in work.steps()]
    passed: list[Tensor] = tokens
    last = ranks[-1].stage
    for stage in range(last + 1):
        here = [rank for rank in ranks if rank.stage == stage]
        meeting = Meeting(len(here))

        def run(number: int, rank: Rank, meeting: Meeting = meeting, given: Sequence[Tensor] = passed) -> list[Tensor]:
            try:
                return _run(rank, whole, work, given, meeting.peers(number, rank.vocabulary.start), last)
            except BaseException:
                meeting.leave()
                raise

        with ThreadPoolExecutor(len(here)) as threads:
            found = list(threads.map(run, range(len(here)), here))
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0])), "all ranks of a stage must have the same bits"
        passed = found[0]
    return passed


@torch.inference_mode()
def _run(rank: Rank, whole: Values, work: Work, given: Sequence[Tensor], peers: Peers, last: int) -> list[Tensor]:
    """Compute all steps of one rank. given: tokens for the first stage, else the residual stream."""
    ops, spec, texts = reference(torch.float32, peers=peers), rank.spec, work.texts
    model, values = Decoder(spec, ops), rank_values(rank, whole)
    for name, target in model.parameters():
        assert isinstance(target, Tensor)
        target.copy_(values[name].reshape(target.shape))
    each = -(-max(map(len, texts)) // PAGE_TOKENS)
    pages = [list(range(i * each, (i + 1) * each)) for i in range(len(texts))]
    caches = allocate_pool(spec, each * len(texts), PAGE_TOKENS, torch.float32, sequences=len(texts))
    found = []
    for parts, x in zip(work.steps(), given, strict=True):
        batch = batch_of(
            [b - a for _, a, b in parts], [b for *_, b in parts], [pages[i] for i, *_ in parts], PAGE_TOKENS,
            [i for i, *_ in parts],
        )  # fmt: skip
        positions = torch.tensor([t for _, a, b in parts for t in range(a, b)])
        lengths = torch.tensor([max(work.first[i], t + 1) for i, a, b in parts for t in range(a, b)])
        step = Step(batch, {rope: cos_sin(rope, positions, lengths) for rope in spec.ropes}, caches)
        if rank.stage == 0:
            x = model(x, step)
        else:
            x, y = x, None
            for block, cache in zip(model.blocks, caches, strict=True):
                x, y = block(x, y, step, cache)
            assert isinstance(y, Tensor)
            x = ops.add(x, y)
        found.append(model.logits(x) if rank.stage == last else x)
    return found
