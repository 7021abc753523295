"""The ops table: the signature of every primitive. Belongs here: signatures, shapes, dtypes. Never: maths.

ops/reference.py is the specification. Layers get an `Ops` and call its functions; its implementation (native, Triton,
reference) is chosen once, when the engine starts.

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
from proa.ops.caches import KvPages, LatentPages, RecurrentState
from proa.ops.residency import Located, Residency


@dataclass(frozen=True)
class DeviceBatch:
    """An AttentionBatch as device tensors at fixed addresses, for a graph to read; S and T include padding."""

    rows_each: int  # decode: sequence s has this many rows, from row s * rows_each on; 0: see q_starts
    q_starts: Tensor  # int32 [S + 1]: each sequence's first row
    kv_lens: Tensor  # int32 [S], 0 for padding
    page_table: Tensor  # int32 [S, most pages]
    states: Tensor  # int32 [S]: each sequence's slot of recurrent states


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of a step, and where their KV is.

    Sequence s owns q_lens[s] consecutive rows of the step; its last row has position kv_lens[s] - 1.
    page_table[s] lists its pages in order; row t's K and V go to slots[t] = page * page_tokens + offset.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_table: tuple[Tensor, ...]  # int64 [pages of s], one per sequence
    slots: Tensor  # int64 [T]; -1: padding row
    device: DeviceBatch | None = None
    states: tuple[int, ...] = ()  # each sequence's slot of recurrent states
    beside_decode: bool = False  # its kernels run beside those of decode steps, and should be short

    @property
    def on_device(self) -> DeviceBatch:
        """The batch as device tensors. Raises ValueError if it has none."""
        if self.device is None:
            raise ValueError("GPU ops need a batch with device tensors (DeviceBatch), but this one has none")
        return self.device


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: weight [N]; eps, added to the mean of squares; offset, added to the weight."""

    weight: Tensor
    eps: float
    offset: float = 0.0


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """x [..., N] / rms(x) * (offset + weight); computed in float32, returned in x's dtype (arXiv 1910.07467)."""


class Add(Protocol):
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y in x's dtype. May run in place in x; use only the return value."""


class Scale(Protocol):
    def __call__(self, x: Tensor, factor: float, /) -> Tensor:
        """x [T, N] * factor, in float32, returned in x's dtype. May run in place; use only the return value."""


class AddNorm(Protocol):
    def __call__(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns x + y and its rms_norm. May add in place in x; use only the return values."""


@dataclass(frozen=True)
class QkNorm:
    """RMSNorm of queries and keys: over each head if the weights are [D], else over all heads together."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0  # added to the weights


@dataclass(frozen=True)
class Angles:
    """Rotary angles of a step's rows: cos, sin float32 [T, R/2], for R dims of each head (arXiv 2104.09864)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool  # GPT-J pairs (neighbouring dims), else half-split


class RotateStore(Protocol):
    def __call__(
        self, q: Tensor, kv: Tensor, norm: QkNorm | None, angles: Angles, cache: KvPages, slots: Tensor
    ) -> Tensor:
        """q [T, heads, D], kv [T, 2 kv_heads, D]: normalise queries and keys, rotate both, store keys and values at
        slots [T] (rows of negative slot are not stored) -> queries [T, heads, D]. May overwrite q and kv; use only the
        return value. q may be strided over heads unless the norm is over all heads together."""


class Gate(Protocol):
    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, heads, D] * sigmoid(gate [T, heads, D]). May run in place in x; use only the return value. gate may be
        strided over heads."""


@dataclass(frozen=True)
class DeltaInputs:
    """Projections of a step's rows, as views by key head: G key heads with R value heads each.

    q, k: [T, G, key dim]; v, z: [T, G, R, value dim]; b, a: [T, G, R]. q, k, v and z have the same strides over T and
    G, and so have b and a; the inner dimensions are contiguous.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a gated delta rule. conv: float32 [channels, 1, taps], channels in the order all q, all k, all v;
    a_log, dt_bias: float32 [G R]; norm: [value dim], with eps."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class GatedDelta(Protocol):
    def __call__(self, x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, batch: AttentionBatch) -> Tensor:
        """The gated delta rule (arXiv 2412.06464) over each sequence's rows, continuing its state
        -> [T, G R value dim].

        q, k and v pass a causal convolution over the last `taps` rows, then SiLU. Then q and k of each head are
        L2-normalised (epsilon 1e-6), and q is scaled by key_dim ** -0.5. For each row and value head:
        S *= exp(-exp(a_log) softplus(a + dt_bias)); S += k (sigmoid(b) (v - S^T k))^T; o = S^T q. The result is
        o / rms(o) * norm * silu(z). All in float32, rounded once. Writes the state after each sequence's last row.
        """


@dataclass(frozen=True)
class RouterRule:
    """The rule that turns router logits into experts and weights: see Route. correction: float32 [E]."""

    top_k: int
    router: Router
    correction: Tensor | None = None


class Route(Protocol):
    def __call__(self, logits: Tensor, slots: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> ids int [T, k], weights float32 [T, k], highest first, the lower id first among equals. In
        float32:

        Scores are softmax(logits) over all experts, or sigmoid(logits) per expert. Experts, and groups if there are
        any, are chosen by score + correction. Weights are the scores of the chosen experts, if renormalised divided by
        max(their sum + epsilon, least), times scale. Rows of negative slot are padding: ids -1. If a row has a NaN, its
        weights are NaN. If the rule's router holds only some of the experts (`held`), ids are counted from the first of
        these, and -1 stands for all others.
        """


@dataclass(frozen=True)
class Chosen:
    """Each row's experts: ids int [T, k], -1: none; weights float32 [T, k]. at: their locations, if the op that chose
    them also looked them up."""

    ids: Tensor
    weights: Tensor
    at: Located | None = None


class Choose(Protocol):
    def __call__(
        self, x: Tensor, y: Tensor | None, norm: Norm, router: LinearMap, slots: Tensor, rule: RouterRule,
        residency: Residency | None,
    ) -> tuple[Tensor, Tensor, Chosen]:  # fmt: skip
        """Returns x + y (y None: x) and its norm, as add_norm, and the experts that `route` chooses from router(norm).
        residency: the layer's residency table on the device, if there is one, for looking up the chosen experts."""


class Argmax(Protocol):
    def __call__(self, logits: Tensor) -> Tensor:
        """logits float32 [R, vocab] -> int [R]: argmax, the lowest id among equals; -1 for a row with a non-finite
        logit."""


class PagedAttention(Protocol):
    def __call__(
        self, q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of q [T, heads, D] over each sequence's pages -> [T, heads, D]; softmax in float32. window:
        tokens that a query sees, itself included. sinks: float32 [heads], one extra logit per head in the softmax,
        without a value."""


class LatentStore(Protocol):
    def __call__(self, q: Tensor, kv: Tensor, norm: Norm, angles: Angles, cache: LatentPages, slots: Tensor) -> Tensor:
        """q [T, heads, K + R], kv [T, rank + R]: rotate the last R dims of each head of q, normalise the latents,
        rotate the keys behind them, store both at slots [T] (rows of negative slot are not stored) -> queries
        [T, heads, K + R]. May overwrite q and kv; use only the return value. Rows of both may be strided; the angles
        cover all R dims."""


class Sink(Protocol):
    """The destination of a parameter that is not a plain tensor in RAM (packed, or on a GPU). The loader passes it rows
    in any order."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def expect(self, stored: str) -> None:
        """Announce the parameter's type in the checkpoint (BF16, Q4_1, ...). Called for all parameters before the first
        row of any, so that the packed format can be chosen."""

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> Sequence[Fill] | None:
        """Jobs for workers that fill `count` rows (None: all remaining) from `first` on, a multiple of `row_unit`; the
        stored `rows` start at row `first`. None if there is no room now, or rows can only be filled by `write`."""

    @property
    def row_unit(self) -> int:
        """Rows must be written in multiples of this, except at the end."""

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows from `first` on, of any float dtype; rounded once if the sink's type is narrower."""


Target = Tensor | Sink
Parameters = Iterator[tuple[str, Target]]


class LinearMap(Protocol):
    """Linear layers that read the same input, fused. Parameters: "<out>.weight" [rows, inputs], "<out>.bias"."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] @ W^T + bias -> [T, sum of outs] in x's dtype, float32 accumulation."""

    def parameters(self) -> Parameters: ...


class Mlp(Protocol):
    """An MLP: down(gating(gate x, up x)), or down(gating(up x)). Parameters: gate, if the gating has one, up, down
    (.weight, .bias)."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def parameters(self) -> Parameters: ...


@dataclass(frozen=True)
class NextRouter:
    """Norm, router and rule of the next MoE layer, to predict its experts."""

    norm: Norm
    router: LinearMap
    rule: RouterRule


class Unsummed(Protocol):
    """The pending output of a MoE layer, whose sum is fused with the residual add by the next op."""

    def scaled(self, factor: float) -> Unsummed:
        """Return this sum multiplied by `factor`, the model's residual factor."""

    def total(self) -> Tensor:
        """The layer's output [T, H] alone: with several ranks, what `join` sums before the residual add."""

    def add(self, x: Tensor) -> Tensor:
        """x [T, H] + the layer's output. May run in place in x; use only the return value."""

    def add_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns x + the layer's output, as `add`, and its norm."""


class Underway(Protocol):
    def groups(self) -> Iterator[None]:
        """Compute the experts that were not started, one group after the other; a prefill step may pause at each yield.
        Exhaust it before `finish`. It yields nothing where all experts were started."""

    def finish(self, shared: Tensor | None, gate: Tensor | None) -> Tensor | Unsummed:
        """The experts' sum [T, H] + shared [T, H], scaled by sigmoid(gate [T, 1]) if given. An Unsummed result must be
        added before the next layer's experts start."""


class LatentMaps(Protocol):
    """Latent attention's W_k [K, rank] and W_v [V, rank] per head, in bfloat16 (reference: the model's dtype), and
    attention through them. Parameter: "kv_b.weight" [heads * (K + V), rank]."""

    def attend(self, q: Tensor, cache: LatentPages, batch: AttentionBatch, scale: float) -> Tensor:
        """Causal attention of q [T, heads, K + R] over each sequence's pages -> [T, heads * V]. A cached row is a
        latent and a rotary key: a head's key is W_k latent, then the rotary key; its value is W_v latent. Softmax in
        float32. The order of the products is free: W_k^T q and the weighted sum of latents instead of keys and values
        are the same sums."""

    def parameters(self) -> Parameters: ...


class Experts(Protocol):
    """The routed experts of a layer. Parameters: "<e>.gate.weight" and so on, and biases."""

    @property
    def residency(self) -> Residency | None:
        """The residency table, if a GPU holds some of the experts."""

    def start(self, x: Tensor, chosen: Chosen) -> Underway:
        """Start computing the sum over k of weights[t, k] * expert[ids[t, k]](x[t]), in a fixed order, in float32; id
        -1 is no expert. Ops called before `finish` may overlap with it."""

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        """Predict which of these experts, those of the next MoE layer, will be chosen, and prefetch them. x [T, hidden]
        is the residual stream at the present layer: its routing mostly agrees with that of the next. Only a hint: no
        result depends on it."""

    def parameters(self) -> Parameters: ...


class NewExperts(Protocol):
    def __call__(
        self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU, *, block: int = 0
    ) -> Experts:  # fmt: skip
        """Make the routed experts of the MoE layer in this block of the model; called once per MoE layer."""


class Embedding(Protocol):
    """Parameter: "weight" [vocab, hidden]."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""

    def logits(self, x: Tensor) -> Tensor:
        """x [R, hidden] -> float32 [R, vocab]: the embedding as a tied head."""

    def parameters(self) -> Parameters: ...


class Maps(Protocol):
    """Makes the parts of a model that own weights, uninitialised until loaded."""

    def linear(self, outs: Mapping[str, int], inputs: int, bias: bool) -> LinearMap: ...

    def router(self, experts: int, hidden: int, bias: bool = False) -> LinearMap:
        """A router, with float32 output. Parameters: "router.weight", "router.bias"."""

    def head(self, vocab: int, hidden: int) -> LinearMap:
        """An output head, with float32 output. Parameter: "head.weight"."""

    def mlp(self, hidden: int, width: int, bias: bool, gating: Gating = SILU) -> Mlp: ...

    def experts(
        self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU, *, block: int = 0
    ) -> Experts: ...  # fmt: skip

    def latent(self, heads: int, keys: int, values: int, rank: int) -> LatentMaps: ...

    def embedding(self, vocab: int, hidden: int, tied: bool) -> Embedding: ...

    def vector(self, width: int) -> Tensor:
        """A norm's weight, in the dtype of activations."""

    def numbers(self, *shape: int) -> Tensor:
        """A small parameter in float32 (sinks, corrections, the delta rule's)."""


class NewBlock(Protocol):
    def __call__(self) -> None:
        """Mark a layer boundary: results of earlier ops may be overwritten, except the residual stream, and its pending
        addend until the next op has read it."""


class Join(Protocol):
    def __call__(self, y: Tensor, /) -> Tensor:
        """y [T, H], this rank's part of a sum -> the sum over the ranks of its pipeline stage, the same bits on each.

        Embeddings are joined by the decoder. A mixer's or FFN's output is joined by the op that adds it to the residual
        stream (add, add_norm, choose, Unsummed), which may fuse the reduction, the sum and the norm."""


class Gather(Protocol):
    def __call__(self, logits: Tensor, /) -> Tensor:
        """logits float32 [R, this rank's rows of the vocabulary] -> [R, vocab], the rows of all ranks in order."""


def alone(part: Tensor, /) -> Tensor:
    """Join and Gather of a single rank: returns its argument."""
    return part


@dataclass(frozen=True)
class Ops:
    maps: Maps
    join: Join
    gather: Gather
    new_block: NewBlock
    rms_norm: RmsNorm
    add: Add
    scale: Scale
    add_norm: AddNorm
    rotate_store: RotateStore
    choose: Choose
    argmax: Argmax
    attention: PagedAttention
    gate: Gate
    gated_delta: GatedDelta
    latent_store: LatentStore


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
