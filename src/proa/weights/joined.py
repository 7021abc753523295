"""Parameters whose rows a checkpoint spreads over several tensors, as the mixer says (models/mixers.py, Spread). Never:
I/O, torch, names of files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from proa.models.names import Declared
from proa.weights.index import TensorInfo, misfit
from proa.weights.source import Source

_MIXER = re.compile(r"blocks\.(\d+)\.mixer\.(\w+)\.weight")


def parts_of(
    name: str, declared: Declared, index: Mapping[str, TensorInfo], problems: list[str]
) -> tuple[Source, ...] | None:  # fmt: skip
    """The sources of parameter `name`, in the order of its rows; None if the checkpoint does not split it. Tensors of
    wrong shape are added to `problems`, and the result is then empty."""
    match = _MIXER.fullmatch(name)
    mixer = declared.spec.blocks[int(match[1])].mixer if match else None
    if match is None or mixer is None or (spread := mixer.spread.get(match[2])) is None:
        return None
    found, before = {}, len(problems)
    for part, shape in spread.shapes.items():
        candidates = declared.names.candidates(f"blocks.{match[1]}.mixer.{part}.weight")
        tensor = next((c for c in candidates if c in index), None)
        if tensor is None:
            return None
        if index[tensor].shape != shape:
            problems.append(misfit(tensor, shape, index[tensor]))
        found[part] = tensor
    if len(problems) > before:
        return ()
    return tuple(
        Source(found[of.tensor], of.first, of.count, 0, spread.shapes[of.tensor][-1], transposed=of.transposed)
        for of in spread.rows
    )
