"""Scales of an fp8 KV cache, as quantised checkpoints have them. Never: scales of weights, the cache.

Writers disagree about the name: a scale stands beside attention, beside the projection of its keys or values, or is one
for both. A value is stored as value / scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from proa.errors import WeightsError
from proa.models.names import Declared
from proa.weights.checkpoint import Checkpoint
from proa.weights.index import FETCH_AGAIN
from proa.weights.rows import open_rows

Scales = tuple[float, float]  # of keys, of values
NO_SCALES: Scales = (1.0, 1.0)


def has_kv_scales(checkpoint: Checkpoint, declared: Declared) -> bool:
    """Whether some layer has a scale."""
    return any(names != (None, None) for names in _names(checkpoint, declared))


def kv_scales(checkpoint: Checkpoint, declared: Declared) -> tuple[Scales, ...]:
    """Of each block, 1 where the checkpoint has none. Raises WeightsError for what is no scale."""
    return tuple((_read(checkpoint, keys), _read(checkpoint, values)) for keys, values in _names(checkpoint, declared))


def _names(checkpoint: Checkpoint, declared: Declared) -> Iterator[tuple[str | None, str | None]]:
    """The tensors of each block's two scales."""
    for block in range(len(declared.spec.blocks)):
        yield (
            _name(checkpoint, declared, f"blocks.{block}.mixer.k.weight", "k"),
            _name(checkpoint, declared, f"blocks.{block}.mixer.v.weight", "v"),
        )


def _name(checkpoint: Checkpoint, declared: Declared, parameter: str, side: str) -> str | None:
    for weight in declared.names.candidates(parameter):
        projection = weight.removesuffix(".weight")
        attention = projection.rpartition(".")[0]
        for name in (
            f"{attention}.{side}_scale", f"{projection}.{side}_scale", f"{projection}.output_scale",
            f"{attention}.attn.{side}_scale", f"{attention}.kv_scale",
        ):  # fmt: skip
            if name in checkpoint.tensors:
                return name
    return None


def _read(checkpoint: Checkpoint, name: str | None) -> float:
    if name is None:
        return 1.0
    info = checkpoint.tensors[name]
    if math.prod(info.shape) != 1:
        raise WeightsError(
            f"{info.file}: {name} has the shape {list(info.shape)}; a layer's KV cache has one scale.",
            "Use --kv-dtype auto.",
        )
    with open_rows(info.file, checkpoint.tensors) as rows:
        scale = float(rows.read(name, 0, info.rows).float().item())
    if not (math.isfinite(scale) and scale >= 2.0**-100):
        raise WeightsError(f"{info.file}: {name} is {scale}, which is no scale.", FETCH_AGAIN)
    return scale
