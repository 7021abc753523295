"""The architecture of a model as frozen dataclasses. Belongs here: mixers, FFNs, router, model, and everything that
follows from their sizes alone. Never: torch, devices, checkpoint names, family names.

Parameters have names of Proa's own (`blocks.3.ffn.experts.7.gate.weight`); models/names.py maps them to a
checkpoint's. Linear weights are [out, in], as in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

Shape = tuple[int, ...]
Params = Iterator[tuple[str, Shape]]


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings; layers/rope.py has the formulas.

    linear: positions / factor. dynamic: NTK-aware base by current length. llama3: low frequencies / factor with a
    smooth transition. yarn: NTK-by-parts (arXiv 2309.00071); mscale as in DeepSeek. factors: frequency i is
    divided by factors[i], as GGUF files store it.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "factors"]
    factor: float
    original_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary embedding over the first `dim` of each head; interleaved = GPT-J pairs, else half-split."""

    dim: int
    base: float = 10000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False

    @property
    def dynamic(self) -> bool:
        """True if angles depend on the sequence's length, not only on the position."""
        return self.scaling is not None and self.scaling.kind == "dynamic"


@dataclass(frozen=True)
class PagedKv:
    """Paged cache of K and V: `kv_heads` x `head_dim` elements each per token."""

    kv_heads: int
    head_dim: int

    @property
    def elems_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def sequence_bytes(self, elem_bytes: int) -> int:
        return 0


@dataclass(frozen=True)
class Recurrent:
    """State of constant size per sequence: a float32 matrix [key_dim, value_dim] per head, and the last `tail` input
    rows of `channels` elements for the causal convolution."""

    heads: int
    key_dim: int
    value_dim: int
    tail: int
    channels: int

    @property
    def elems_per_token(self) -> int:
        return 0

    def sequence_bytes(self, elem_bytes: int) -> int:
        return 4 * self.heads * self.key_dim * self.value_dim + elem_bytes * self.tail * self.channels


@dataclass(frozen=True)
class Latent:
    """Paged cache of latent attention, shared by all heads: a latent of `rank` elements and a rotary key of `key_dim`
    elements per token."""

    rank: int
    key_dim: int

    @property
    def elems_per_token(self) -> int:
        return self.rank + self.key_dim

    def sequence_bytes(self, elem_bytes: int) -> int:
        return 0


# What a mixer caches of earlier tokens.
CacheSpec = PagedKv | Latent | Recurrent


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. qk_norm: RMSNorm before rotary, over each head ("head") or over all heads ("full").

    gated: each head's rows of the q projection are followed by as many gate rows; sigmoid(gate) scales the head's
    output. sinks: each head has one extra logit in the softmax, without a value.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None  # tokens that a query sees, itself included; None: all earlier ones
    gated: bool = False
    sinks: bool = False

    @property
    def q_rows(self) -> int:
        """Output rows of the q projection, gate rows included."""
        return self.heads * self.head_dim * (2 if self.gated else 1)

    def params(self) -> Params:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "q.weight", (self.q_rows, self.hidden)
        yield "k.weight", (kv, self.hidden)
        yield "v.weight", (kv, self.hidden)
        yield "o.weight", (self.hidden, q)
        if self.qkv_bias:
            yield "q.bias", (self.q_rows,)
            yield "k.bias", (kv,)
            yield "v.bias", (kv,)
        if self.o_bias:
            yield "o.bias", (self.hidden,)
        if self.qk_norm != "none":
            yield "q_norm.weight", (self.head_dim if self.qk_norm == "head" else q,)
            yield "k_norm.weight", (self.head_dim if self.qk_norm == "head" else kv,)
        if self.sinks:
            yield "sinks", (self.heads,)

    @property
    def cache(self) -> CacheSpec:
        return PagedKv(self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule (arXiv 2412.06464); ops/table.py, GatedDelta, has the formulas.

    Each key head serves value_heads / key_heads value heads. `taps` is the width of the causal convolution over
    q, k and v. Rows of qkvz, per key head: its q and k, then v and z of its value heads. Rows of ba, per key head: b,
    then a of its value heads.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def params(self) -> Params:
        values = self.value_heads * self.value_dim
        yield "qkvz.weight", (self.channels + values, self.hidden)
        yield "ba.weight", (2 * self.value_heads, self.hidden)
        yield "conv.weight", (self.channels, 1, self.taps)  # channels: all of q, all of k, all of v
        yield "a_log", (self.value_heads,)
        yield "dt_bias", (self.value_heads,)
        yield "norm.weight", (self.value_dim,)
        yield "out.weight", (self.hidden, values)

    @property
    def cache(self) -> CacheSpec:
        return Recurrent(self.value_heads, self.key_dim, self.value_dim, self.taps - 1, self.channels)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are projections of one latent per
    token.

    A head's key is W_k latent (`key_dim` elements) followed by a rotary key of rope.dim elements shared by all heads;
    its value is W_v latent. kv_b has per head the rows of W_k, then those of W_v. q_rank: rank of the query latent;
    None: queries are projected from the hidden state. Scores are scaled by (key_dim + rope.dim) ** -0.5, times the
    square of the mscale that YaRN's mscale_all_dim gives. norm_eps: epsilon of both latents' RMSNorms.
    """

    hidden: int
    heads: int
    q_rank: int | None
    rank: int
    key_dim: int
    value_dim: int
    rope: Rope
    norm_eps: float = 1e-6

    @property
    def q_rows(self) -> int:
        return self.heads * (self.key_dim + self.rope.dim)

    def params(self) -> Params:
        if self.q_rank is None:
            yield "q.weight", (self.q_rows, self.hidden)
        else:
            yield "q_a.weight", (self.q_rank, self.hidden)
            yield "q_a_norm.weight", (self.q_rank,)
            yield "q_b.weight", (self.q_rows, self.q_rank)
        yield "kv_a.weight", (self.rank + self.rope.dim, self.hidden)
        yield "kv_a_norm.weight", (self.rank,)
        yield "kv_b.weight", (self.heads * (self.key_dim + self.value_dim), self.rank)
        yield "o.weight", (self.hidden, self.heads * self.value_dim)

    @property
    def cache(self) -> CacheSpec:
        return Latent(self.rank, self.rope.dim)


Mixer = Attention | LatentAttention | GatedDeltaNet


@dataclass(frozen=True)
class Gating:
    """An MLP's activation: combines gate and up into the input of down. silu: silu(gate) * up.

    clamped_swiglu: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, limit) and u = up clamped to [-limit, limit].
    """

    kind: Literal["silu", "clamped_swiglu"] = "silu"
    limit: float = 0.0


SILU = Gating()


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: down(gating(gate x, up x)); bias: on all three projections."""

    hidden: int
    width: int
    bias: bool = False
    gating: Gating = SILU

    def params(self) -> Params:
        for name, out, inp in (
            ("gate", self.width, self.hidden),
            ("up", self.width, self.hidden),
            ("down", self.hidden, self.width),
        ):
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
    """One transformer layer: x += mixer(norm1 x); x += ffn(norm2 x)."""

    mixer: Mixer
    ffn: Mlp | Moe


@dataclass(frozen=True)
class Model:
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    norm_eps: float
    max_positions: int  # longest context of the checkpoint, tokens
    tied: bool = False  # the output head shares the embedding's weights
    norm_offset: float = 0.0  # added to RMSNorm weights, except to the norm inside a GatedDeltaNet

    def params(self, routed: bool = True) -> Params:
        """Every parameter once, with its shape; routed: including the routed experts."""
        yield "embed.weight", (self.vocab, self.hidden)
        for i, block in enumerate(self.blocks):
            yield f"blocks.{i}.norm1.weight", (self.hidden,)
            yield f"blocks.{i}.norm2.weight", (self.hidden,)
            for name, shape in block.mixer.params():
                yield f"blocks.{i}.mixer.{name}", shape
            ffn = block.ffn.params(routed) if isinstance(block.ffn, Moe) else block.ffn.params()
            for name, shape in ffn:
                yield f"blocks.{i}.ffn.{name}", shape
        yield "norm.weight", (self.hidden,)
        if not self.tied:
            yield "head.weight", (self.vocab, self.hidden)

    @cached_property
    def num_params(self) -> int:
        return sum(prod(shape) for _, shape in self.params())

    def kv_bytes_per_token(self, elem_bytes: int) -> int:
        return elem_bytes * sum(b.mixer.cache.elems_per_token for b in self.blocks)

    def state_bytes_per_sequence(self, elem_bytes: int) -> int:
        """Bytes of the recurrent state of one sequence, which do not grow with its length."""
        return sum(b.mixer.cache.sequence_bytes(elem_bytes) for b in self.blocks)

    @cached_property
    def recurrent(self) -> bool:
        """True if a layer keeps a recurrent state, which each token overwrites, so that pages alone restore nothing."""
        return any(isinstance(b.mixer.cache, Recurrent) for b in self.blocks)

    @cached_property
    def attention(self) -> tuple[Attention, ...]:
        """The grouped-query attention mixers, in layer order."""
        return tuple(b.mixer for b in self.blocks if isinstance(b.mixer, Attention))

    @cached_property
    def latent_attention(self) -> tuple[LatentAttention, ...]:
        return tuple(b.mixer for b in self.blocks if isinstance(b.mixer, LatentAttention))

    @cached_property
    def ropes(self) -> frozenset[Rope]:
        return frozenset(m.rope for m in self.attention) | frozenset(m.rope for m in self.latent_attention)

    @cached_property
    def num_active_params(self) -> int:
        """Parameters read to decode one token: of the experts only the top-k, the head whole, an untied embedding
        counted as 0 (one row)."""
        moes = [b.ffn for b in self.blocks if isinstance(b.ffn, Moe)]
        idle = sum(max(0, ffn.experts - ffn.top_k) * _count(ffn.expert) for ffn in moes)
        lookup = 0 if self.tied else self.vocab * self.hidden
        return self.num_params - idle - lookup


def _count(part: Mixer | Mlp | Moe) -> int:
    return sum(prod(shape) for _, shape in part.params())
