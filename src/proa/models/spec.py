"""The architecture of a model as frozen dataclasses. Belongs here: FFNs, router, block, model, and everything that
follows from their sizes alone; mixers are in models/mixers.py. Never: torch, devices, checkpoint names, family names.

Parameters have names of Proa's own (`blocks.3.ffn.experts.7.gate.weight`); models/names.py maps them to a
checkpoint's. Linear weights are [out, in], as in every checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from proa.models.mixers import (
    Attention,
    CacheSpec,
    GatedDeltaNet,
    Latent,
    LatentAttention,
    Mixer,
    PagedKv,
    Params,
    Recurrent,
    Rope,
    RopeScaling,
    Shape,
)

__all__ = [
    "SILU", "Attention", "Block", "CacheSpec", "ExpertGroups", "GatedDeltaNet", "Gating", "Held", "Latent",
    "LatentAttention", "Mixer", "Mlp", "Model", "Moe", "PagedKv", "Params", "Recurrent", "Rope", "RopeScaling",
    "Router", "Shape",
]  # fmt: skip


@dataclass(frozen=True)
class Gating:
    """An MLP's activation: combines gate and up into the input of down. silu: silu(gate) * up.

    clamped_swiglu: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, limit) and u = up clamped to [-limit, limit].
    relu2: max(up, 0)^2, without a gate.
    """

    kind: Literal["silu", "clamped_swiglu", "relu2"] = "silu"
    limit: float = 0.0

    @property
    def gated(self) -> bool:
        return self.kind != "relu2"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The projections that it reads, in the order in which they are stacked."""
        return ("gate", "up") if self.gated else ("up",)


SILU = Gating()


@dataclass(frozen=True)
class Mlp:
    """An MLP: down(gating(gate x, up x)), or down(gating(up x)) without a gate; bias: on all projections."""

    hidden: int
    width: int
    bias: bool = False
    gating: Gating = SILU

    @property
    def widest(self) -> int:
        """Width of the widest MLP that a row passes."""
        return self.width

    def params(self, routed: bool = True) -> Params:
        inner = ((name, self.width, self.hidden) for name in self.gating.inputs)
        for name, out, inp in (*inner, ("down", self.hidden, self.width)):
            yield f"{name}.weight", (out, inp)
            if self.bias:
                yield f"{name}.bias", (out,)


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing: `groups` groups of equal size; only experts of the `kept` best groups are eligible. A
    group's score is the sum of its `best_of` highest expert scores."""

    groups: int
    kept: int
    best_of: int


@dataclass(frozen=True)
class Held:
    """The experts of one rank, if they are divided over ranks: `count` of `scored`, from number `first` on."""

    first: int
    count: int
    scored: int


@dataclass(frozen=True)
class Router:
    """Router logits -> top-k expert ids and weights, in float32; ops/table.py, Route, has the formulas."""

    score: Literal["softmax", "sigmoid"]  # softmax over all experts, or sigmoid per expert
    renormalise: bool  # the top-k weights sum to 1 before `scale`
    correction: bool = False  # a parameter per expert, added to its score for the top-k choice only, not to its weight
    groups: ExpertGroups | None = None
    scale: float = 1.0  # multiplies the final weights
    epsilon: float = 0.0  # added to the sum that renormalising divides by
    least: float = 0.0  # lower bound of that sum
    linear_bias: bool = False  # bias of the projection that gives the logits
    held: Held | None = None  # the layer's experts, if they are only some of those that the router scores


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: routed experts, plus a shared MLP for every token, scaled by sigmoid(shared_gate x) if
    `shared_gate`."""

    hidden: int
    experts: int
    top_k: int
    width: int
    router: Router
    shared: Mlp | None = None
    shared_gate: bool = False
    bias: bool = False  # each routed expert's gate, up and down have biases
    gating: Gating = SILU  # activation of the routed experts

    @property
    def expert(self) -> Mlp:
        return Mlp(self.hidden, self.width, self.bias, self.gating)

    @property
    def widest(self) -> int:
        return max(self.width, self.shared.width if self.shared else 0)

    @property
    def scored(self) -> int:
        """Number of experts that the router scores."""
        return self.router.held.scored if self.router.held else self.experts

    def params(self, routed: bool = True) -> Params:
        """Every parameter with its shape; routed: including the routed experts."""
        yield "router.weight", (self.scored, self.hidden)
        if self.router.linear_bias:
            yield "router.bias", (self.scored,)
        if self.router.correction:
            yield "router.correction", (self.scored,)
        expert = tuple(self.expert.params())
        for e in range(self.experts if routed else 0):
            for name, shape in expert:
                yield f"experts.{e}.{name}", shape
        if self.shared:
            for name, shape in self.shared.params():
                yield f"shared.{name}", shape
        if self.shared_gate:
            yield "shared_gate.weight", (1, self.hidden)


@dataclass(frozen=True)
class Block:
    """One transformer layer: x += mixer(norm1 x); x += ffn(norm2 x). One of the two may be missing, with its norm."""

    mixer: Mixer | None
    ffn: Mlp | Moe | None

    def params(self, routed: bool = True) -> Params:
        """Every parameter with its shape; routed: including the routed experts."""
        if self.mixer is not None:
            yield "norm1.weight", (self.mixer.hidden,)
        if self.ffn is not None:
            yield "norm2.weight", (self.ffn.hidden,)
        for name, shape in self.mixer.params() if self.mixer else ():
            yield f"mixer.{name}", shape
        for name, shape in self.ffn.params(routed) if self.ffn else ():
            yield f"ffn.{name}", shape


@dataclass(frozen=True)
class Model:
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    norm_eps: float
    max_positions: int  # longest context of the checkpoint, tokens
    tied: bool = False  # the output head shares the embedding's weights
    norm_offset: float = 0.0  # added to RMSNorm weights, except to the norm inside a GatedDeltaNet
    embedding_factor: float = 1.0  # multiplies embeddings
    residual_factor: float = 1.0  # multiplies the output of every mixer and FFN before it is added
    logits_factor: float = 1.0  # multiplies logits

    def params(self, routed: bool = True) -> Params:
        """Every parameter once, with its shape; routed: including the routed experts."""
        yield "embed.weight", (self.vocab, self.hidden)
        for i, block in enumerate(self.blocks):
            for name, shape in block.params(routed):
                yield f"blocks.{i}.{name}", shape
        yield "norm.weight", (self.hidden,)
        if not self.tied:
            yield "head.weight", (self.vocab, self.hidden)

    @cached_property
    def num_params(self) -> int:
        return sum(prod(shape) for _, shape in self.params())

    def kv_bytes_per_token(self, elem_bytes: int) -> int:
        return elem_bytes * sum(cache.elems_per_token for cache in self.caches)

    def state_bytes_per_sequence(self, elem_bytes: int) -> int:
        """Bytes of the recurrent state of one sequence, which do not grow with its length."""
        return sum(cache.sequence_bytes(elem_bytes) for cache in self.caches)

    @cached_property
    def recurrent(self) -> bool:
        """True if a layer keeps a recurrent state, which each token overwrites, so that pages alone restore nothing."""
        return not all(cache.can_roll_back for cache in self.caches)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(block.mixer for block in self.blocks if block.mixer)

    @cached_property
    def ffns(self) -> tuple[Mlp | Moe, ...]:
        return tuple(block.ffn for block in self.blocks if block.ffn)

    @cached_property
    def caches(self) -> tuple[CacheSpec, ...]:
        return tuple(cache for mixer in self.mixers for cache in mixer.caches)

    @cached_property
    def ropes(self) -> frozenset[Rope]:
        return frozenset(rope for mixer in self.mixers for rope in mixer.ropes)

    @cached_property
    def routed(self) -> dict[int, Moe]:
        """The mixtures of experts, by number of their block."""
        return {i: block.ffn for i, block in enumerate(self.blocks) if isinstance(block.ffn, Moe)}

    @property
    def scaled(self) -> bool:
        return (self.embedding_factor, self.residual_factor, self.logits_factor) != (1.0, 1.0, 1.0)

    @cached_property
    def num_active_params(self) -> int:
        """Parameters read to decode one token: of the experts only the top-k, the head whole, an untied embedding
        counted as 0 (one row)."""
        idle = sum(max(0, ffn.experts - ffn.top_k) * _count(ffn.expert) for ffn in self.routed.values())
        lookup = 0 if self.tied else self.vocab * self.hidden
        return self.num_params - idle - lookup


def _count(part: Mixer | Mlp | Moe) -> int:
    return sum(prod(shape) for _, shape in part.params())
