"""Spec class -> layer class, by table. Never: family names."""

from __future__ import annotations

import torch

from proa.layers.attention import Attention
from proa.layers.mlp import Mlp
from proa.layers.moe import Moe
from proa.models import spec
from proa.ops.table import Ops


def build_mixer(s: spec.Attention, eps: float, ops: Ops, dtype: torch.dtype) -> Attention:
    return Attention(s, eps, ops, dtype)


def build_ffn(s: spec.Mlp | spec.Moe, ops: Ops, dtype: torch.dtype) -> Mlp | Moe:
    match s:
        case spec.Mlp():
            return Mlp(s, ops, dtype)
        case spec.Moe():
            return Moe(s, ops, dtype)
