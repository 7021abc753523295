"""Reads the scales of an FP8 KV cache from quantised checkpoints. Never: scales of weights, the cache, the tensors'
names (kv_scale_names.py)."""

from __future__ import annotations

import math

from proa.errors import WeightsError
from proa.models.names import Declared
from proa.weights.checkpoint import Checkpoint
from proa.weights.index import FETCH_AGAIN
from proa.weights.kv_scale_names import kv_scale_names
from proa.weights.rows import open_rows

Scales = tuple[float, float]  # (K, V)


def kv_scales(checkpoint: Checkpoint, declared: Declared) -> tuple[Scales, ...]:
    """Read each layer's scales (K, V); 1 if the checkpoint has none. Raises WeightsError for a scale that is not a
    finite number of at least 2^-100, and for several scales per layer."""
    return tuple(
        (_read(checkpoint, keys), _read(checkpoint, values)) for keys, values in kv_scale_names(checkpoint, declared)
    )


def _read(checkpoint: Checkpoint, name: str | None) -> float:
    if name is None:
        return 1.0
    info = checkpoint.tensors[name]
    if math.prod(info.shape) != 1:
        raise WeightsError(
            f"{info.file}: {name} has the shape {list(info.shape)}, but only one scale per layer is implemented.",
            "Use --kv-dtype auto.",
        )
    with open_rows(info.file, checkpoint.tensors) as rows:
        scale = float(rows.read(name, 0, info.rows).float().item())
    if not (math.isfinite(scale) and scale >= 2.0**-100):
        raise WeightsError(f"{info.file}: {name} is {scale}; a scale must be finite and at least 2^-100.", FETCH_AGAIN)
    return scale
