"""The ops table: every primitive named once. Belongs here: signatures, shapes, dtypes. Never: maths.

ops/reference.py is the specification. Layers get an `Ops` and call `ops.linear(...)`; which implementation
stands behind a name is settled once, in engine/building/load.py or engine/building/gpu_plan.py, and printed at start.

Shapes: T tokens of the step (all sequences concatenated), S sequences, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from proa.models.spec import SILU, Gating, Router
from proa.native.fill import Fill, StoredRows
from proa.ops.residency import Located, Residency


@dataclass(frozen=True)
class DeviceBatch:
    """An AttentionBatch as tensors that stay where they are, for a graph to read; S and T include padding."""

    rows_each: int  # sequence s has rows s * rows_each to (s + 1) * rows_each - 1; 0: q_starts alone says
    q_starts: Tensor  # int32 [S + 1]: each sequence's first row
    kv_lens: Tensor  # int32 [S], 0 for padding
    page_table: Tensor  # int32 [S, most pages]
    states: Tensor  # int32 [S]: each sequence's slot of recurrent states


@dataclass(frozen=True)
class AttentionBatch:
    """Where each sequence of a step keeps its KV.

    Sequence s owns q_len[s] consecutive rows of the step; its last row sits at position kv_len[s] - 1.
    page_table[s] lists its pages in order; slots[t] = page * page_tokens + offset is where row t's K and V go.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_table: tuple[Tensor, ...]  # int64 [pages of s], one per sequence
    slots: Tensor  # int64 [T]; -1: a row of padding
    device: DeviceBatch | None = None
    states: tuple[int, ...] = ()  # each sequence's slot of recurrent states

    @property
    def on_device(self) -> DeviceBatch:
        """Raises ValueError where it does not say."""
        if self.device is None:
            raise ValueError("a GPU reads its batch from the device, and this one does not stand there")
        return self.device


@dataclass(frozen=True)
class KvPages:
    """One layer's cache. keys, values: [pages, page_tokens, kv_heads, D], of the activations' type or float8_e4m3fn.

    Scales are of float8, exact in float32. What is stored is value * (1 / scale) in float32, rounded to nearest; of
    that, finite numbers beyond 448 become 448, others NaN.
    """

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True)
class LatentPages:
    """One layer's cache of latent attention. rows: [pages, page_tokens, rank + R]: of each token a latent, then the
    key that all heads share."""

    rows: Tensor
    rank: int


@dataclass(frozen=True)
class RecurrentState:
    """One layer's, by slots. A sequence that has no past yet finds anything in its slot, and does not read it.

    rule: float32 [slots, value heads, key dim, value dim]. tail: [slots, taps - 1, channels], the oldest row first.
    """

    rule: Tensor
    tail: Tensor


LayerCache = KvPages | LatentPages | RecurrentState


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """x [..., N] / rms(x) * (offset + weight [N]); computed in float32, returned in x's dtype (arXiv
        1910.07467)."""


class Add(Protocol):
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y in x's dtype. May be stored in x: whoever calls goes on with the result alone."""


class AddNorm(Protocol):
    def __call__(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
        """x + y, which may be stored in x, and its rms_norm."""


@dataclass(frozen=True)
class QkNorm:
    """RMSNorm of queries and keys: over each head where the weights are [D], over all heads together otherwise."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0  # added to the weights


@dataclass(frozen=True)
class Angles:
    """Of a step's rows: cos, sin float32 [T, R/2], for the first R dims of each head (arXiv 2104.09864)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool  # pairs of neighbours, else of halves


class RotateStore(Protocol):
    def __call__(
        self, q: Tensor, kv: Tensor, norm: QkNorm | None, angles: Angles, cache: KvPages, slots: Tensor
    ) -> Tensor:
        """q [T, heads, D], kv [T, 2 kv_heads, D]: normalise queries and keys, rotate both, store keys and values at
        slots [T] (where they are not negative) -> queries [T, heads, D]. May work in q and kv themselves. Heads of q
        may lie apart if there is a norm over each."""


class Gate(Protocol):
    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, heads, D] * sigmoid(gate [T, heads, D]). May be stored in x. Heads of the gate may lie apart."""


@dataclass(frozen=True)
class DeltaInputs:
    """Projections of a step's rows, as views in groups: each key head with its value heads, G x R of them.

    q, k: [T, G, key dim]; v, z: [T, G, R, value dim]; b, a: [T, G, R]. q, k, v and z have the same strides over T and
    G, and so have b and a; the rest of each lies together.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


@dataclass(frozen=True)
class DeltaWeights:
    """conv float32 [channels, 1, taps], channels being all of q, all of k, all of v; a_log, dt_bias float32 [G R]; norm
    [value dim], with eps."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class GatedDelta(Protocol):
    def __call__(self, x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, batch: AttentionBatch) -> Tensor:
        """The gated delta rule (arXiv 2412.06464) over each sequence's rows, from its state on -> [T, G R value dim].

        q, k and v pass a causal convolution of the last `taps` rows, and SiLU. Then q and k of each head have length 1
        (their squares sum to 1, but for 1e-6), q times key_dim ** -0.5. For each row and value head, in float32:
        S *= exp(-exp(a_log) softplus(a + dt_bias)); S += k (sigmoid(b) (v - S^T k))^T; o = S^T q. The result is
        o / rms(o) * norm * silu(z). All of it in float32, rounded once. Writes the state after each sequence's
        last row.
        """


@dataclass(frozen=True)
class RouterRule:
    """How a router's logits become a choice: see Route. correction: float32 [E]."""

    top_k: int
    router: Router
    correction: Tensor | None = None


class Route(Protocol):
    def __call__(self, logits: Tensor, slots: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> ids int [T, k], weights float32 [T, k], best first, of equals the lower id. In float32:

        Scores are softmax(logits) or sigmoid(logits). The choice is by score + correction, of groups too, where there
        are groups; the weights are the scores of those chosen, to renormalise divided by their sum + epsilon, or by
        `least` if that is more, times scale. Rows whose slot is negative are padding: ids -1. Weights of a row that has
        NaN are NaN.
        """


@dataclass(frozen=True)
class Norm:
    """RMSNorm's weight [N], what is added to the mean of squares, and to the weight."""

    weight: Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Chosen:
    """Each row's experts: ids int [T, k], -1: none; weights float32 [T, k]. at: where they are, if that was looked up
    with the choice."""

    ids: Tensor
    weights: Tensor
    at: Located | None = None


class Choose(Protocol):
    def __call__(
        self, x: Tensor, y: Tensor, norm: Norm, router: LinearMap, slots: Tensor, rule: RouterRule,
        residency: Residency | None,
    ) -> tuple[Tensor, Tensor, Chosen]:  # fmt: skip
        """x + y and its norm, as add_norm; the experts that `route` takes from router(norm). residency: of the layer's
        experts on the device, where they can be looked up."""


class Best(Protocol):
    def __call__(self, logits: Tensor) -> Tensor:
        """float32 [R, vocab] -> int [R], the largest one's id, the lowest of equals; -1 where any is not finite."""


class PagedAttention(Protocol):
    def __call__(
        self, q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of q [T, heads, D] over each sequence's pages -> [T, heads, D]; softmax in float32. sinks
        float32 [heads]: a logit of each head that takes its share of the softmax and has no value."""


class LatentStore(Protocol):
    def __call__(self, q: Tensor, kv: Tensor, norm: Norm, angles: Angles, cache: LatentPages, slots: Tensor) -> Tensor:
        """q [T, heads, K + R], kv [T, rank + R]: rotate the last R values of each head of q, normalise the latents,
        rotate the keys behind them, store both at slots [T] (where they are not negative) -> queries [T, heads, K + R].
        May work in q and kv themselves. Rows of both may lie apart; angles turn all of R."""


class LatentAttention(Protocol):
    def __call__(self, q: Tensor, cache: LatentPages, batch: AttentionBatch, scale: float) -> Tensor:
        """Causal attention of q [T, heads, rank + R] over each sequence's pages -> [T, heads, rank]: every head's keys
        are the cached rows, its values their latents. Softmax in float32."""


class Sink(Protocol):
    """Where a parameter goes that is not kept as a plain tensor: its rows are handed over, in any order."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def expect(self, stored: str) -> None:
        """The checkpoint stores it as this type (BF16, Q4_1...). Told of all parameters before the first row."""

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> Sequence[Fill] | None:
        """What workers do to fill `count` rows (None: all that follow) from `first` on, a multiple of `row_unit`, from
        rows of a file, of which the first is `first`. None where there is no room for them now, or only `write` does.
        """

    @property
    def row_unit(self) -> int:
        """Rows must be written in multiples of this, but for the last ones."""

    def write(self, first: int, rows: Tensor) -> None:
        """Rows from `first` on, of any float type; rounded once if the sink's type is narrower."""


Target = Tensor | Sink
Parameters = Iterator[tuple[str, Target]]


class LinearMap(Protocol):
    """Linear maps that read the same input, as one. Parameters: "<out>.weight" [rows, inputs], "<out>.bias"."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] @ W^T + bias -> [T, sum of outs] in x's dtype, float32 accumulation."""

    def parameters(self) -> Parameters: ...


class Mlp(Protocol):
    """down(gating(gate x, up x)). Parameters: gate, up, down (.weight, .bias)."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def parameters(self) -> Parameters: ...


@dataclass(frozen=True)
class NextRouter:
    """What the next MoE layer will choose by: its norm of the residual stream, its router, its rule."""

    norm: Norm
    router: LinearMap
    rule: RouterRule


class Unsummed(Protocol):
    """What a MoE layer adds to the residual stream x [T, H], of a device that adds both up at once."""

    def add(self, x: Tensor) -> Tensor:
        """x + all of it. May be stored in x: whoever calls goes on with the result alone."""

    def add_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The same, and its norm."""


class Underway(Protocol):
    def finish(self, shared: Tensor | None, gate: Tensor | None) -> Tensor | Unsummed:
        """The experts' sum [T, H] + shared [T, H], which is scaled by sigmoid(gate [T, 1]) if there is one. What is not
        added up yet must be before the next layer's experts start."""


class LatentMaps(Protocol):
    """Of each head W_k [K, rank] and W_v [V, rank], bfloat16 in the GPU's and the native ops. Parameter: "kv_b.weight"
    [heads * (K + V), rank]."""

    def queries(self, q: Tensor) -> Tensor:
        """q [T, heads, K + R] -> [T, heads, rank + R]: W_k^T of each head's first K values, and the others."""

    def values(self, seen: Tensor) -> Tensor:
        """seen [T, heads, rank] -> [T, heads * V]: W_v of each head's latent."""

    def parameters(self) -> Parameters: ...


class Experts(Protocol):
    """The routed experts of a layer. Parameters: "<e>.gate.weight" and so on, and biases."""

    @property
    def residency(self) -> Residency | None:
        """Where they are, if a device has some of them."""

    def start(self, x: Tensor, chosen: Chosen) -> Underway:
        """Sum over k of weights[t, k] * expert[ids[t, k]](x[t]), in a fixed order, in float32; id -1 is no expert.
        What is computed until `finish` may run beside them."""

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        """These experts are those of the next MoE layer; x [T, hidden] is the residual stream that the present one
        reads, and likely to choose as it will when these are asked. No result depends on it."""

    def parameters(self) -> Parameters: ...


class NewExperts(Protocol):
    def __call__(
        self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU
    ) -> Experts:  # fmt: skip
        """The routed experts of the model's next MoE layer, wherever they live."""


class Embedding(Protocol):
    """Parameter: "weight" [vocab, hidden]."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""

    def logits(self, x: Tensor) -> Tensor:
        """x [R, hidden] -> float32 [R, vocab]: the embedding as the head."""

    def parameters(self) -> Parameters: ...


class Maps(Protocol):
    """Makes everything that owns weights, uninitialised until loaded."""

    def linear(self, outs: Mapping[str, int], inputs: int, bias: bool) -> LinearMap: ...

    def router(self, experts: int, hidden: int, bias: bool = False) -> LinearMap:
        """Parameters "router.weight" and "router.bias"; gives float32."""

    def head(self, vocab: int, hidden: int) -> LinearMap:
        """Parameter "head.weight"; gives float32."""

    def mlp(self, hidden: int, width: int, bias: bool, gating: Gating = SILU) -> Mlp: ...

    def experts(self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU) -> Experts: ...

    def latent(self, heads: int, keys: int, values: int, rank: int) -> LatentMaps: ...

    def embedding(self, vocab: int, hidden: int, tied: bool) -> Embedding: ...

    def vector(self, width: int) -> Tensor:
        """A norm's weight."""

    def numbers(self, *shape: int) -> Tensor:
        """A few parameters in float32."""


class NewBlock(Protocol):
    def __call__(self) -> None:
        """A block of layers begins: of what the ops have returned, only the residual stream is still read, and by the
        next op what is to be added to it."""


@dataclass(frozen=True)
class Ops:
    maps: Maps
    new_block: NewBlock
    rms_norm: RmsNorm
    add: Add
    add_norm: AddNorm
    rotate_store: RotateStore
    choose: Choose
    best: Best
    attention: PagedAttention
    gate: Gate
    gated_delta: GatedDelta
    latent_store: LatentStore
    latent_attention: LatentAttention


def batch_of(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_tokens: int,
    states: Sequence[int] = (),
) -> AttentionBatch:
    """Build an AttentionBatch from plain lists: pages[s] are sequence s's pages in order, states[s] its slot."""
    slots = [
        pages[s][p // page_tokens] * page_tokens + p % page_tokens
        for s, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True))
        for p in range(kv - q, kv)
    ]
    tables = tuple(torch.tensor(pages[s][: -(-kv // page_tokens)], dtype=torch.int64) for s, kv in enumerate(kv_lens))
    rows = torch.tensor(slots, dtype=torch.int64)
    return AttentionBatch(tuple(q_lens), tuple(kv_lens), tables, rows, states=tuple(states))
