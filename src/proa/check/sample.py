"""Chooses the layers of a large model that are checked, as a smaller model over the same files. Never: loading.

The sampled model has the chosen blocks in their order, with the embedding and the head. The reference gets the same
blocks, so that the comparison is exact whatever blocks are left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from proa.models.names import Declared, NameTable
from proa.models.spec import Block, Model
from proa.plan.opened import Opened
from proa.weights.checkpoint import Checkpoint
from proa.weights.index import TensorInfo
from proa.weights.sources import Sources, resolve, stored_types

SAMPLE_BYTES = 1 << 30  # of blocks as stored: every path loads them
_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class SampledNames(NameTable):
    """Names of a model that has only some blocks of the checkpoint. layers: the checkpoint's number of each."""

    layers: tuple[int, ...] = ()

    def candidates(self, name: str) -> tuple[str, ...]:
        return super().candidates(_BLOCK.sub(lambda match: f"blocks.{self.layers[int(match[1])]}.", name))


@dataclass(frozen=True)
class Sample:
    """opened: the model that is checked. layers: the number in the whole model of each of its blocks. of: the number of
    blocks of the whole model."""

    opened: Opened
    layers: tuple[int, ...]
    of: int


def sample(opened: Opened, seed: int, most_bytes: int = SAMPLE_BYTES) -> Sample:
    """All blocks if they are stored in `most_bytes`; else the first, the last, one of each kind (mixer, FFN and stored
    types), and as many more, drawn by the seed, as fit. The first four conditions may exceed `most_bytes`."""
    checkpoint, spec = opened.checkpoint, opened.declared.spec
    count = len(spec.blocks)
    sources = resolve(opened.declared, checkpoint.tensors)
    sizes = _sizes(sources, checkpoint.tensors, count)
    if sum(sizes) <= most_bytes:
        return Sample(opened, tuple(range(count)), count)
    kinds = _kinds(spec, sources, checkpoint.tensors)
    chosen = {min(i for i, kind in enumerate(kinds) if kind == wanted) for wanted in set(kinds)} | {0, count - 1}
    others = [i for i in range(count) if i not in chosen]
    random.Random(seed).shuffle(others)
    left = most_bytes - sum(sizes[i] for i in chosen)
    for i in others:
        if sizes[i] <= left:
            chosen.add(i)
            left -= sizes[i]
    return _reduced(opened, sources, tuple(sorted(chosen)))


def _sizes(sources: Sources, tensors: Mapping[str, TensorInfo], count: int) -> list[int]:
    """Stored bytes of each block."""
    sizes = [0] * count
    for name in (*sources.params, *sources.joined):
        if match := _BLOCK.match(name):
            for source in sources.of(name):
                info = tensors[source.tensor]
                elements = max(1, info.rows * (info.shape[-1] if info.shape else 1))
                sizes[int(match[1])] += info.nbytes * source.rows * source.cols // elements
    return sizes


def _kinds(spec: Model, sources: Sources, tensors: Mapping[str, TensorInfo]) -> list[tuple[Block, frozenset[str]]]:
    types: list[set[str]] = [set() for _ in spec.blocks]
    for name, stored in stored_types(sources, tensors).items():
        if match := _BLOCK.match(name):
            types[int(match[1])].add(stored)
    return [(block, frozenset(stored)) for block, stored in zip(spec.blocks, types, strict=True)]


def _reduced(opened: Opened, sources: Sources, layers: tuple[int, ...]) -> Sample:
    declared, checkpoint = opened.declared, opened.checkpoint
    used = {
        source.tensor
        for name in (*sources.params, *sources.joined)
        for source in sources.of(name)
        if (match := _BLOCK.match(name)) is None or int(match[1]) in layers
    }
    if sources.tied_head is not None:
        used.add(sources.tied_head.tensor)
    used |= set(sources.ignored)
    used |= {name for name in sources.zeros if f"{name.removesuffix('bias')}weight" in used}
    spec = replace(declared.spec, blocks=tuple(declared.spec.blocks[i] for i in layers))
    own = {of.name: getattr(declared.names, of.name) for of in fields(declared.names)}
    names = SampledNames(**own, layers=layers)
    smaller: Checkpoint = replace(
        checkpoint, tensors={name: info for name, info in checkpoint.tensors.items() if name in used}
    )
    return Sample(Opened(smaller, Declared(spec, names)), layers, len(declared.spec.blocks))
