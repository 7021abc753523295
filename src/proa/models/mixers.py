"""Mixers as frozen dataclasses: what mixes the tokens of a sequence in a block. Belongs here: everything that the rest
of Proa needs to know about a mixer, in plain numbers. Never: torch, devices, checkpoint names.

A mixer declares its parameters, its rotary embeddings (`ropes`), its caches in the order in which its layer takes them
(`caches`), the kernels that do its work (`kernels`; plan/kernels.py has their limits and buffers), its activations
(`row_values`, and those that a GPU's kernels write, `device_row_bytes`), its share of a decode graph (`graph_nodes`)
and how files may spread a parameter over several tensors (`spread`). models/ranks.py divides it over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

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
    """Rotary embedding over the first `dim` of each head; interleaved = GPT-J pairs, else half-split.

    axes: for positions along several axes (M-RoPE: time, height, width), the axis of each of the dim / 2 frequencies;
    empty: one axis. Raises ValueError if `axes` does not fit.
    """

    dim: int
    base: float = 10000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.axes and (len(self.axes) != self.dim // 2 or self.dynamic):
            raise ValueError(f"{len(self.axes)} axes for {self.dim // 2} frequencies, or beside dynamic scaling")

    @property
    def dynamic(self) -> bool:
        """True if angles depend on the sequence's length, not only on the position."""
        return self.scaling is not None and self.scaling.kind == "dynamic"


@dataclass(frozen=True)
class PagedKv:
    """Paged cache of K and V: `kv_heads` x `head_dim` elements each per token."""

    can_roll_back: ClassVar = True  # a sequence may be cut short: later tokens overwrite
    has_kv_dtype: ClassVar = True  # --kv-dtype applies

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

    can_roll_back: ClassVar = False  # each token overwrites the state
    has_kv_dtype: ClassVar = False

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

    can_roll_back: ClassVar = True
    has_kv_dtype: ClassVar = False

    rank: int
    key_dim: int

    @property
    def elems_per_token(self) -> int:
        return self.rank + self.key_dim

    def sequence_bytes(self, elem_bytes: int) -> int:
        return 0


# What a mixer remembers of earlier tokens; cache/pool.py has a row for each class.
CacheSpec = PagedKv | Latent | Recurrent


@dataclass(frozen=True)
class AttentionKernel:
    """Attention over paged K and V; head_dim: elements of a head's query, key or value."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentKernel:
    """Attention of all heads over latents of `rank` elements and `rotary_dim` rotary ones. key_dim, value_dim: elements
    of a head's key, without the rotary ones, and value, if they are expanded."""

    heads: int
    rank: int
    rotary_dim: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class DeltaKernel:
    """The gated delta rule; heads: value heads of `value_dim` elements. taps: of the convolution."""

    heads: int
    value_dim: int
    taps: int


# The kernel of a mixer, in the numbers that its limits and buffers follow from; plan/kernels.py has a row for each.
Kernel = AttentionKernel | LatentKernel | DeltaKernel


@dataclass(frozen=True)
class Rows:
    """`count` rows of a tensor from row `first` on; transposed: the parameter has them as columns."""

    tensor: str
    first: int
    count: int
    transposed: bool = False


@dataclass(frozen=True)
class Spread:
    """A parameter whose rows some files spread over several tensors. shapes: of the tensors, by names like those of
    parameters. rows: which rows, in order, make up the parameter; iterated only if all shapes are right, because a
    config may claim any number of heads."""

    shapes: Mapping[str, Shape]
    rows: Iterator[Rows]


class _Mixer:
    """Defaults of the properties that mixers declare."""

    # Most nodes of a captured decode step: half of the 16 that were measured for a block; the FFN has the others.
    graph_nodes: ClassVar = 8

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings whose angles it reads."""
        return ()

    @property
    def pair_bytes(self) -> int:
        """Bytes per (query, key) pair in plain torch, besides the causal mask."""
        return 0

    @property
    def pair_flops(self) -> int:
        """Floating-point operations per (query, key) pair, of all heads: scores and weighted values."""
        return 0

    @property
    def row_flops(self) -> int:
        """Floating-point operations per row besides its matrices and pairs."""
        return 0

    def seen(self, past_tokens: float) -> float:
        """Tokens of a past that a query sees, and whose cache a decode step reads."""
        return past_tokens

    @property
    def spread(self) -> Mapping[str, Spread]:
        """Its weights that some files spread over several tensors, by name without ".weight"."""
        return {}


@dataclass(frozen=True)
class Attention(_Mixer):
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
    scale: float | None = None  # multiplies scores; None: head_dim ** -0.5

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
    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return (PagedKv(self.kv_heads, self.head_dim),)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (AttentionKernel(self.heads, self.kv_heads, self.head_dim),)

    @property
    def row_values(self) -> int:
        """Queries, gates, keys and values before and after rotary (4 each)."""
        return 4 * (self.q_rows + 2 * self.kv_heads * self.head_dim)

    @property
    def device_row_bytes(self) -> int:
        """Projections, keys and values apart, queries after rotary, the output: all bfloat16."""
        return 2 * (self.q_rows + 2 * (2 * self.kv_heads + self.heads) * self.head_dim)

    @property
    def pair_bytes(self) -> int:
        return 5 if self.sinks else 0  # a head's logits in float32, and a second mask

    @property
    def pair_flops(self) -> int:
        return 4 * self.heads * self.head_dim

    def seen(self, past_tokens: float) -> float:
        return past_tokens if self.window is None else min(past_tokens, self.window)


@dataclass(frozen=True)
class GatedDeltaNet(_Mixer):
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
    def caches(self) -> tuple[CacheSpec, ...]:
        return (Recurrent(self.value_heads, self.key_dim, self.value_dim, self.taps - 1, self.channels),)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (DeltaKernel(self.value_heads, self.value_dim, self.taps),)

    @property
    def row_values(self) -> int:
        """The projections and what is computed from them (4 each), and the products of the convolution."""
        return (4 + self.taps) * self.channels + 4 * self.value_heads * self.value_dim

    @property
    def device_row_bytes(self) -> int:
        """Both projections in bfloat16, the convolution's output and the rule's in float32, the gated one."""
        values = self.value_heads * self.value_dim
        return 2 * (self.channels + values + 2 * self.value_heads) + 4 * (self.channels + values) + 2 * values

    @property
    def row_flops(self) -> int:
        """Each head's state decays, is multiplied by the key, updated, and multiplied by the query."""
        return 7 * self.value_heads * self.key_dim * self.value_dim

    @property
    def spread(self) -> Mapping[str, Spread]:
        """GGUF stores q, k and v of all heads in one tensor, and z in another."""
        values = self.value_heads * self.value_dim
        return {"qkvz": Spread({"qkv": (self.channels, self.hidden), "z": (values, self.hidden)}, self._head_by_head())}

    def _head_by_head(self) -> Iterator[Rows]:
        keys, width = self.key_heads * self.key_dim, self.value_heads // self.key_heads * self.value_dim
        for head in range(self.key_heads):
            yield Rows("qkv", head * self.key_dim, self.key_dim)
            yield Rows("qkv", keys + head * self.key_dim, self.key_dim)
            yield Rows("qkv", 2 * keys + head * width, width)
            yield Rows("z", head * width, width)


@dataclass(frozen=True)
class LatentAttention(_Mixer):
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are projections of one latent per
    token.

    A head's key is W_k latent (`key_dim` elements) followed by a rotary key of rope.dim elements shared by all heads;
    its value is W_v latent. kv_b has per head the rows of W_k, then those of W_v. q_rank: rank of the query latent;
    None: queries are projected from the hidden state. Scores are scaled by (key_dim + rope.dim) ** -0.5, times the
    square of the mscale that YaRN's mscale_all_dim gives. norm_eps: epsilon of both latents' RMSNorms.
    """

    graph_nodes: ClassVar = 12  # four more: queries' norm and second projection, heads' projections

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
    def ropes(self) -> tuple[Rope, ...]:
        return (self.rope,)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return (Latent(self.rank, self.rope.dim),)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (LatentKernel(self.heads, self.rank, self.rope.dim, self.key_dim, self.value_dim),)

    @property
    def row_values(self) -> int:
        """As for Attention, and each head's latent query, latent sum and output (2 each)."""
        among_latents = self.heads * (2 * self.rank + self.rope.dim + self.value_dim)
        return 4 * (self.q_rows + (self.q_rank or 0) + self.rank + self.rope.dim) + 2 * among_latents

    @property
    def device_row_bytes(self) -> int:
        """Projections, the queries' latents before and after their norm, heads' values and the output, all bfloat16;
        what attention takes besides is LatentKernel's (plan/kernels.py)."""
        latents = 2 * (self.q_rank or 0) + self.rank + self.rope.dim
        return 2 * (self.q_rows + latents + 2 * self.heads * self.value_dim)

    @property
    def pair_flops(self) -> int:
        """Scores and weighted values are products with latents. A GPU's prompts may need fewer (plan/kernels.py)."""
        return 2 * self.heads * (2 * self.rank + self.rope.dim)

    @property
    def spread(self) -> Mapping[str, Spread]:
        """GGUF stores W_k, transposed, and W_v of all heads in two tensors."""
        keys, values = (self.heads, self.rank, self.key_dim), (self.heads, self.value_dim, self.rank)
        return {"kv_b": Spread({"k_b": keys, "v_b": values}, self._keys_and_values())}

    def _keys_and_values(self) -> Iterator[Rows]:
        for head in range(self.heads):
            yield Rows("k_b", head * self.rank, self.rank, transposed=True)
            yield Rows("v_b", head * self.value_dim, self.value_dim)


Mixer = Attention | LatentAttention | GatedDeltaNet
