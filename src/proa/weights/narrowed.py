"""The sources of one rank's parameters, and where a stored matrix may be cut. Never: I/O, torch, dividing a model
(models/ranks.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from proa.models.ranks import Part, Rank, Units
from proa.weights.index import TensorInfo
from proa.weights.source import Source, stored_units
from proa.weights.sources import Sources


def narrow(sources: Sources, rank: Rank) -> Sources:
    """The sources of a rank's parameters, given those of the whole model's."""
    params: dict[str, Source] = {}
    joined: dict[str, tuple[Source, ...]] = {}
    blank = []
    for name, shape in rank.spec.params():
        part = rank.parts[name]
        if part is None or 0 in shape:
            blank.append(name)
            continue
        found = _cut_out(sources.of(part.name), part, vector=len(shape) == 1)
        if len(found) == 1:
            params[name] = found[0]
        else:
            joined[name] = tuple(found)
    first = rank.stage == 0 and rank.vocabulary.start == 0
    return replace(
        sources, params=params, joined=joined, blank=tuple(blank), tied_head=sources.tied_head if first else None
    )


def units(sources: Sources, tensors: Mapping[str, TensorInfo]) -> Units:
    """Return the units by which parameters may be cut so that their parts keep the checkpoint's format."""

    def unit(name: str) -> tuple[int, int]:
        stored = [(source, stored_units(tensors[source.tensor])) for source in sources.of(name)]
        turned = [(columns, rows) if source.transposed else (rows, columns) for source, (rows, columns) in stored]
        return lcm(*(rows for rows, _ in turned)), lcm(*(columns for _, columns in turned))

    return unit


def _cut_out(whole: Sequence[Source], part: Part, *, vector: bool) -> list[Source]:
    """The part of a parameter whose rows are those of `whole` one after another. vector: a parameter of one dimension,
    which is stored as a row."""
    if vector:
        return [source.part(range(1), rows) for source in whole for rows in part.rows]
    found = []
    for rows in part.rows:
        first = 0
        for source in whole:
            here = range(max(rows.start - first, 0), min(rows.stop - first, source.height))
            if here:
                found.append(source.part(here, part.columns))
            first += source.height
    return found
