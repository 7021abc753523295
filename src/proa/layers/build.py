"""Spec class -> layer, by table. Never: family names."""

from __future__ import annotations

from collections.abc import Callable
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

    def __call__(self, x: Tensor, step: Step, caches: Any) -> Tensor:
        """x [T, hidden] -> [T, hidden]; caches: a tuple with one for each of the spec's `caches`."""

    def parameters(self) -> Parameters: ...


_MIXERS: dict[type[spec.Mixer], Callable[[Any, spec.Model, Ops], Mixer]] = {
    spec.Attention: Attention,
    spec.LatentAttention: LatentAttention,
    spec.GatedDeltaNet: GatedDeltaNet,
}


def build_mixer(s: spec.Mixer, model: spec.Model, ops: Ops) -> Mixer:
    return _MIXERS[type(s)](s, model, ops)


def build_ffn(s: spec.Mlp | spec.Moe, ops: Ops, block: int) -> Mlp | Moe:
    return Mlp(s, ops) if isinstance(s, spec.Mlp) else Moe(s, ops, block)
