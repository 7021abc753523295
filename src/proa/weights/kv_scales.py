"""Scales of an fp8 KV cache, as quantised checkpoints have them. Never: scales of weights, the cache, their names
(kv_scale_names.py)."""

from __future__ import annotations

import math

from proa.errors import WeightsError
from proa.models.names import Declared
from proa.weights.checkpoint import Checkpoint
from proa.weights.index import FETCH_AGAIN
from proa.weights.kv_scale_names import kv_scale_names
from proa.weights.rows import open_rows

Scales = tuple[float, float]  # of keys, of values


def kv_scales(checkpoint: Checkpoint, declared: Declared) -> tuple[Scales, ...]:
    """Of each block, 1 where the checkpoint has none. Raises WeightsError for what is no scale."""
    return tuple(
        (_read(checkpoint, keys), _read(checkpoint, values)) for keys, values in kv_scale_names(checkpoint, declared)
    )


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
