"""Spec class -> layer, by table. Never: family names."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from proa.layers.attention import Attention
from proa.layers.gated_delta_net import GatedDeltaNet
from proa.layers.latent_attention import LatentAttention
from proa.layers.mlp import Mlp
from proa.layers.moe import Moe
from proa.layers.step import Step
from proa.models import spec
from proa.ops.table import Ops, Parameters


class Mixer(Protocol):
    """The part of a layer that mixes tokens of a sequence: attention or a recurrent layer."""

    def __call__(self, x: Tensor, step: Step, cache: Any) -> Tensor:
        """x [T, hidden] -> [T, hidden]; `cache` is of the type that the spec's `cache` describes."""

    def parameters(self) -> Parameters: ...


def build_mixer(s: spec.Mixer, model: spec.Model, ops: Ops) -> Mixer:
    match s:
        case spec.Attention():
            return Attention(s, model.norm_eps, model.norm_offset, ops)
        case spec.LatentAttention():
            return LatentAttention(s, model.norm_offset, ops)
        case spec.GatedDeltaNet():
            return GatedDeltaNet(s, model.norm_eps, ops)


def build_ffn(s: spec.Mlp | spec.Moe, ops: Ops) -> Mlp | Moe:
    match s:
        case spec.Mlp():
            return Mlp(s, ops)
        case spec.Moe():
            return Moe(s, ops)
