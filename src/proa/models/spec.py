"""What a model is: frozen shapes. Belongs here: mixers, FFNs, router, model, and everything that follows
from their numbers alone. Never: torch, devices, checkpoint names, family names.

Parameter names are ours (`blocks.3.ffn.experts.7.gate.weight`); models/names.py maps them to a
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
    """Frequency scaling of rotary embeddings; the formulas stand in layers/rope.py.

    linear: positions / factor. dynamic: NTK base by current length. llama3: low frequencies / factor with a
    smooth border. yarn: NTK-by-parts (arXiv 2309.00071); mscale as DeepSeek uses it. factors: frequency i is
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
        """Whether angles depend on how long the sequence is, not only on the position."""
        return self.scaling is not None and self.scaling.kind == "dynamic"


@dataclass(frozen=True)
class PagedKv:
    """Per token: K and V of `kv_heads` x `head_dim` elements each, paged."""

    kv_heads: int
    head_dim: int

    @property
    def elems_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def sequence_bytes(self, elem_bytes: int) -> int:
        return 0


@dataclass(frozen=True)
class Recurrent:
    """Per sequence, however long: a float32 matrix [key_dim, value_dim] of each head, and the last `tail` rows of
    `channels` elements that a causal convolution still needs."""

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
    """Per token, once for all heads: a latent of `rank` elements and a key of `key_dim`, paged."""

    rank: int
    key_dim: int

    @property
    def elems_per_token(self) -> int:
        return self.rank + self.key_dim

    def sequence_bytes(self, elem_bytes: int) -> int:
        return 0


# What a mixer must remember.
CacheSpec = PagedKv | Latent | Recurrent


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. qk_norm before rotary: RMSNorm over each head ("head") or over all heads ("full").

    gated: each head's rows of q are followed by those of a gate, and sigmoid(gate) scales what the head has seen.
    sinks: each head has a logit that takes its share of the softmax and has no value.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None  # tokens visible to the left, the own one included
    gated: bool = False
    sinks: bool = False

    @property
    def q_rows(self) -> int:
        """Outputs of q's projection, gates included."""
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
    """Linear attention by the gated delta rule (arXiv 2412.06464); ops/table.py, GatedDelta, says how it computes.

    Each of `key_heads` serves value_heads / key_heads value heads. `taps` is the width of the causal convolution over
    q, k and v. Rows of qkvz: of each key head q and k, then v and z of its value heads; of ba likewise b and a.
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
    """Multi-head latent attention (arXiv 2405.04434): all heads' keys and values are maps of one latent of a token.

    A head's key is W_k latent, `key_dim` values, and behind it a key of rope.dim that turns and that all heads share;
    its value is W_v latent. kv_b has the rows of W_k, then of W_v, head by head. q_rank: of the latent that queries are
    maps of, None: of the hidden state itself. Scores are scaled by (key_dim + rope.dim) ** -0.5, and by the square of
    yarn's mscale_all_dim. norm_eps: of both latents' norms.
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
    """How an MLP's gate and up become what down reads. silu: silu(gate) * up.

    clamped_swiglu: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, limit) and u = up between -limit and limit.
    """

    kind: Literal["silu", "clamped_swiglu"] = "silu"
    limit: float = 0.0


SILU = Gating()


@dataclass(frozen=True)
class Mlp:
    """down(gating(gate x, up x)), with a bias each or none."""

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
    """Experts lie in `groups` groups of one size, and are chosen from the `kept` best ones: those whose `best_of` best
    experts have the largest sum."""

    groups: int
    kept: int
    best_of: int


@dataclass(frozen=True)
class Router:
    """logits -> top-k expert ids and weights, in float32; ops/table.py, Route, says how."""

    score: Literal["softmax", "sigmoid"]  # of each expert by itself, or over all of them
    renormalise: bool
    correction: bool = False  # a parameter of each expert, added to its score for the choice alone
    groups: ExpertGroups | None = None
    scale: float = 1.0  # of the weights in the end
    epsilon: float = 0.0  # added to the sum that renormalising divides by,
    least: float = 0.0  # which counts as at least this
    linear_bias: bool = False  # of the map that gives the logits


@dataclass(frozen=True)
class Moe:
    """Routed experts, plus a shared MLP for every token, scaled by sigmoid(shared_gate x) if gated."""

    hidden: int
    experts: int
    top_k: int
    width: int
    router: Router
    shared: Mlp | None = None
    shared_gate: bool = False
    bias: bool = False  # of each routed expert's gate, up and down
    gating: Gating = SILU  # of each routed expert

    @property
    def expert(self) -> Mlp:
        return Mlp(self.hidden, self.width, self.bias, self.gating)

    def params(self, routed: bool = True) -> Params:
        """routed: those of the routed experts too."""
        yield "router.weight", (self.experts, self.hidden)
        if self.router.linear_bias:
            yield "router.bias", (self.experts,)
        if self.router.correction:
            yield "router.correction", (self.experts,)
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
    max_positions: int  # the context the checkpoint was made for, tokens
    tied: bool = False  # the output head is the embedding
    norm_offset: float = 0.0  # added to the weights of RMSNorms; those inside of a GatedDeltaNet are whole

    def params(self, routed: bool = True) -> Params:
        """Every parameter once, with its shape. routed: those of the routed experts too."""
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
        """Of what does not grow with a sequence."""
        return sum(b.mixer.cache.sequence_bytes(elem_bytes) for b in self.blocks)

    @cached_property
    def recurrent(self) -> bool:
        """Whether some of a sequence's past is only in a state that every token overwrites."""
        return any(isinstance(b.mixer.cache, Recurrent) for b in self.blocks)

    @cached_property
    def attention(self) -> tuple[Attention, ...]:
        """The mixers of grouped-query attention, in the order of their blocks."""
        return tuple(b.mixer for b in self.blocks if isinstance(b.mixer, Attention))

    @cached_property
    def latent_attention(self) -> tuple[LatentAttention, ...]:
        return tuple(b.mixer for b in self.blocks if isinstance(b.mixer, LatentAttention))

    @cached_property
    def ropes(self) -> frozenset[Rope]:
        return frozenset(m.rope for m in self.attention) | frozenset(m.rope for m in self.latent_attention)

    @cached_property
    def num_active_params(self) -> int:
        """Parameters read to decode one token: top-k experts only, one embedding row, the whole head."""
        idle = sum((b.ffn.experts - b.ffn.top_k) * _count(b.ffn.expert) for b in self.blocks if isinstance(b.ffn, Moe))
        lookup = 0 if self.tied else self.vocab * self.hidden
        return self.num_params - idle - lookup

    @cached_property
    def largest_block_params(self) -> int:
        """Parameters of the largest single layer: the unit of the loader's memory promise."""
        return max((_count(b.mixer) + _count(b.ffn) + 2 * self.hidden for b in self.blocks), default=0)


def _count(part: Mixer | Mlp | Moe) -> int:
    return sum(prod(shape) for _, shape in part.params())
