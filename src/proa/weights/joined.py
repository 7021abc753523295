"""Parameters whose rows a checkpoint spreads over several tensors. Never: I/O, torch, names of files.

GGUF stores a Gated DeltaNet's q, k and v of all heads in one tensor and z in another, while Proa's qkvz is ordered by
head; and for latent attention it stores W_k (transposed) and W_v in two tensors, while Proa's kv_b holds both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from proa.models.names import Declared
from proa.models.spec import GatedDeltaNet, LatentAttention, Shape
from proa.weights.index import TensorInfo, misfit
from proa.weights.source import Source

_MIXER = re.compile(r"blocks\.(\d+)\.mixer\.(qkvz|kv_b)\.weight")


def parts_of(
    name: str, declared: Declared, index: Mapping[str, TensorInfo], problems: list[str]
) -> tuple[Source, ...] | None:  # fmt: skip
    """The sources of parameter `name`, in the order of its rows; None if the checkpoint does not split it. Tensors of
    wrong shape are added to `problems`, and the result is then empty."""
    match = _MIXER.fullmatch(name)
    if match is None:
        return None
    mixer, found = declared.spec.blocks[int(match[1])].mixer, {}
    before = len(problems)
    for part, shape in _shapes(mixer).items():
        candidates = declared.names.candidates(f"blocks.{match[1]}.mixer.{part}.weight")
        tensor = next((c for c in candidates if c in index), None)
        if tensor is None:
            return None
        if index[tensor].shape != shape:
            problems.append(misfit(tensor, shape, index[tensor]))
        found[part] = tensor
    if len(problems) > before:  # with wrong shapes, the config's number of heads is no bound on the loops below
        return ()
    if isinstance(mixer, GatedDeltaNet):
        return _head_by_head(mixer, found)
    return _keys_and_values(mixer, found) if isinstance(mixer, LatentAttention) else None


def _shapes(mixer: object) -> dict[str, Shape]:
    match mixer:
        case GatedDeltaNet():
            values = mixer.value_heads * mixer.value_dim
            return {"qkv": (mixer.channels, mixer.hidden), "z": (values, mixer.hidden)}
        case LatentAttention():
            keys = (mixer.heads, mixer.rank, mixer.key_dim)
            return {"k_b": keys, "v_b": (mixer.heads, mixer.value_dim, mixer.rank)}
    return {}


def _head_by_head(mixer: GatedDeltaNet, found: Mapping[str, str]) -> tuple[Source, ...]:
    keys, width = mixer.key_heads * mixer.key_dim, mixer.value_heads // mixer.key_heads * mixer.value_dim
    parts = []
    for head in range(mixer.key_heads):
        for part, first, rows in (
            ("qkv", head * mixer.key_dim, mixer.key_dim),
            ("qkv", keys + head * mixer.key_dim, mixer.key_dim),
            ("qkv", 2 * keys + head * width, width),
            ("z", head * width, width),
        ):
            parts.append(Source(found[part], first, rows, 0, mixer.hidden))
    return tuple(parts)


def _keys_and_values(mixer: LatentAttention, found: Mapping[str, str]) -> tuple[Source, ...]:
    parts = []
    for head in range(mixer.heads):
        parts.append(Source(found["k_b"], head * mixer.rank, mixer.rank, 0, mixer.key_dim, transposed=True))
        parts.append(Source(found["v_b"], head * mixer.value_dim, mixer.value_dim, 0, mixer.rank))
    return tuple(parts)
