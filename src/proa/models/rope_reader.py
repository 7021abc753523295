"""Rotary embedding and context length, read from a config in either spelling. Never: formulas (layers/rope.py).

The keys and defaults are those of Hugging Face transformers' modeling_rope_utils.
"""

from __future__ import annotations

from proa.models.config_reader import Reader
from proa.models.spec import Rope, RopeScaling


def rope(c: Reader, head_dim: int, theta: float, partial: float | None = None) -> Rope:
    """Read rope_parameters (transformers 5), or rope_theta and rope_scaling (before).

    theta: default base. partial: default of partial_rotary_factor, the rotary share of each head; None: the whole head
    is rotary, and the config may not say otherwise. The key `rope_interleaved` comes from models/gguf.py: the file
    pairs neighbouring dimensions. Raises ConfigError.
    """
    theta = c.get("rope_theta", float, theta)
    new = c.has("rope_parameters")
    if new:
        c.expect("rope_scaling")
    p = c.sub("rope_parameters" if new else "rope_scaling")
    dim = head_dim if partial is None else _rotary_dim(c, p, head_dim, partial)
    if partial is None:
        for part in (c, p):
            part.expect("partial_rotary_factor", 1.0)
    scaling = _scaling(p, _positions(c), c.size("original_max_position_embeddings", None))
    if scaling and scaling.kind == "factors" and len(scaling.factors) != dim // 2:
        raise p.error(f"{len(scaling.factors)} rope factors for {dim // 2} frequencies")
    return Rope(
        dim=dim,
        base=p.get("rope_theta", float, theta),
        scaling=scaling,
        interleaved=c.get("rope_interleaved", bool, False),
    )


def _rotary_dim(c: Reader, p: Reader, head_dim: int, partial: float) -> int:
    """Rotary dimensions of each head, from partial_rotary_factor."""
    share = p.get("partial_rotary_factor", float, c.get("partial_rotary_factor", float, partial))
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise p.error(
            f"partial_rotary_factor {share} gives {dim} rotary dimensions of head_dim {head_dim}, "
            "but there must be an even number from 2 up to head_dim"
        )
    return dim


def _scaling(p: Reader, positions: int, original: int | None) -> RopeScaling | None:
    """Read the scaling variants of transformers' modeling_rope_utils, with its defaults; None: no scaling."""
    kind = p.get_any(("rope_type", "type"), str, "default")
    if kind == "default":
        return None
    if kind == "factors":
        factors = tuple(float(f) for f in p.get("factors", list))
        return RopeScaling("factors", 1.0, positions, factors=factors)
    trained = p.size("original_max_position_embeddings", positions)
    trained = trained if original is None else original
    extended = kind == "yarn" and not p.has("factor") and trained != positions  # null: transformers divides
    factor = positions / trained if extended else p.get("factor", float)
    if factor < 1.0:
        raise p.error(f"factor must be at least 1, but it is {factor}")
    if kind in ("linear", "dynamic"):
        return RopeScaling("linear" if kind == "linear" else "dynamic", factor, positions)  # not the original ones
    if kind == "llama3":
        low, high = p.get("low_freq_factor", float), p.get("high_freq_factor", float)
        if not 0 < low < high:
            raise p.error(f"low_freq_factor {low} must be above 0 and below high_freq_factor {high}")
        return RopeScaling("llama3", factor, trained, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return _yarn(p, factor, trained)
    raise p.error(f"rope type {kind!r} is not implemented, only default, linear, dynamic, llama3 and yarn")


def _yarn(p: Reader, factor: float, trained: int) -> RopeScaling:
    """YaRN: beta 0 or null means the default; without attention_factor, layers/rope.py computes it."""
    return RopeScaling(
        "yarn",
        factor,
        trained,
        beta_fast=p.get("beta_fast", float, 0.0) or 32.0,
        beta_slow=p.get("beta_slow", float, 0.0) or 1.0,
        attention_factor=p.get("attention_factor", float, None),
        mscale=p.get("mscale", float, None),
        mscale_all_dim=p.get("mscale_all_dim", float, None),
        truncate=p.get("truncate", bool, True),
    )


def _positions(c: Reader) -> int:
    """The trained context, in tokens. Llama 1 wrote max_sequence_length, its first files neither key: it has 2048, as
    have families that assume no other."""
    return c.get_any(("max_position_embeddings", "max_sequence_length"), int, 2048)


def context_tokens(c: Reader, rope: Rope) -> int:
    """The longest context, in tokens: YaRN and dynamic scaling extend the trained one, which configs often keep."""
    positions, scaling = _positions(c), rope.scaling
    if scaling is None or scaling.kind not in ("yarn", "dynamic"):
        return positions
    return max(positions, int(scaling.original_positions * scaling.factor))
