"""Spec class -> layer, by table. Never: family names."""

from __future__ import annotations

from proa.layers.attention import Attention
from proa.layers.mlp import Mlp
from proa.layers.moe import Moe
from proa.models import spec
from proa.ops.table import Ops


def build_mixer(s: spec.Attention, eps: float, ops: Ops) -> Attention:
    return Attention(s, eps, ops)


def build_ffn(s: spec.Mlp | spec.Moe, ops: Ops) -> Mlp | Moe:
    match s:
        case spec.Mlp():
            return Mlp(s, ops)
        case spec.Moe():
            return Moe(s, ops)
