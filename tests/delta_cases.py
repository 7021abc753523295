"""The gated delta rule in float64, written out token by token, with error bounds for float32. Never: tests.

A step's transition S -> decay (I - beta k k^T) S never enlarges S, since k has length 1, and beta and decay are at most
1. So the error of a state grows only by what each step adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from delta_chunk_bounds import CHUNK, EPS32, chunk_errors
from proa.ops.caches import RecurrentState
from proa.ops.table import DeltaInputs, DeltaWeights


@dataclass(frozen=True)
class Shape:
    groups: int
    members: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def heads(self) -> int:
        return self.groups * self.members

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key_dim + self.heads * self.value_dim


SHAPES = {"small": Shape(2, 3, 24, 16, 4), "one": Shape(1, 1, 24, 16, 2), "wide": Shape(2, 2, 40, 80, 3)}
QWEN3_NEXT = Shape(16, 2, 128, 128, 4)
# (rows of the step, rows altogether) of each sequence; the history comes in a step before.
CASES = {
    "one token": [(1, 1)],
    "prompt": [(7, 7)],
    "decode": [(1, 2), (1, 9), (1, 1)],
    "mixed": [(2, 8), (5, 5), (1, 4), (9, 11), (3, 4)],
}
LONG = [(1, 4), (70, 70), (5, 40), (33, 68), (3, 3)]  # some of it by chunks


def inputs(shape: Shape, rows: int, rng: torch.Generator, dtype: torch.dtype) -> DeltaInputs:
    """Random projections as views, like a layer's."""
    wide = shape.members * shape.value_dim
    projected = torch.randn(rows, shape.groups, 2 * (shape.key_dim + wide), generator=rng).to(dtype)
    gates = (2 * torch.randn(rows, shape.groups, 2 * shape.members, generator=rng)).to(dtype)
    return views(shape, projected, gates)


def views(shape: Shape, projected: Tensor, gates: Tensor) -> DeltaInputs:
    wide = shape.members * shape.value_dim
    q, k, v, z = torch.split(projected, [shape.key_dim, shape.key_dim, wide, wide], -1)
    b, a = gates.chunk(2, -1)
    v, z = (t.view(len(t), shape.groups, shape.members, shape.value_dim) for t in (v, z))
    return DeltaInputs(q, k, v, z, b, a)


def joined(shape: Shape, parts: Sequence[DeltaInputs]) -> DeltaInputs:
    """Concatenate rows, as views again."""
    projected = torch.cat([torch.cat((p.q, p.k, p.v.flatten(2), p.z.flatten(2)), -1) for p in parts])
    return views(shape, projected, torch.cat([torch.cat((p.b, p.a), -1) for p in parts]))


def weights(shape: Shape, rng: torch.Generator, dtype: torch.dtype) -> DeltaWeights:
    conv = torch.randn(shape.channels, 1, shape.taps, generator=rng)
    a_log, dt_bias = torch.randn(2, shape.heads, generator=rng)
    return DeltaWeights(conv, a_log, dt_bias, torch.randn(shape.value_dim, generator=rng).to(dtype), 1e-6)


def poisoned_state(shape: Shape, slots: int, dtype: torch.dtype) -> RecurrentState:
    rule = torch.full((slots, shape.heads, shape.key_dim, shape.value_dim), torch.nan)
    return RecurrentState(rule, torch.full((slots, shape.taps - 1, shape.channels), torch.nan, dtype=dtype))


def part(x: DeltaInputs, rows: slice) -> DeltaInputs:
    return DeltaInputs(*(t[rows] for t in vars(x).values()))


@dataclass(frozen=True)
class Mixed:
    """What the rule reads of each row and head: q, k [T, heads, key_dim], v [T, heads, value_dim], beta and the decay's
    negative logarithm [T, heads], in float64; and how far off float32 may be: lengths of errors [T, heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    rate: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_rate: Tensor


@dataclass(frozen=True)
class Ruled:
    """seen [T, heads, value_dim], lengths of its errors [T, heads]; the state, the length of its error [heads]."""

    seen: Tensor
    d_seen: Tensor
    state: Tensor
    off: Tensor


@dataclass
class Exact:
    """Results of a sequence from its first token on: out [T, heads, value_dim] and its bound; the state after the last
    row."""

    out: Tensor
    bound: Tensor
    rule: Tensor
    rule_bound: Tensor  # per head: length of the error
    tail: Tensor


def gates(x: DeltaInputs, w: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """beta, decay rate and its error, per row and head."""
    beta = torch.sigmoid(x.b.double()).flatten(1)
    rate = torch.exp(w.a_log.double()) * torch.nn.functional.softplus(x.a.double().flatten(1) + w.dt_bias.double())
    # Softplus of float32 may be off by an eps of its argument and of 1, whatever is left of it then.
    d_rate = rate * 16 * EPS32 + torch.exp(w.a_log.double()) * 4 * EPS32 * (1 + x.a.double().flatten(1).abs())
    return beta, rate, d_rate


def mix(x: DeltaInputs, w: DeltaWeights, shape: Shape, padded: Tensor) -> Mixed:
    """padded: q, k and v of all channels, behind as many zeros as there are taps before a row's own."""
    rows, heads = len(x.q), shape.heads
    windows = padded.double().unfold(0, shape.taps, 1)
    products = windows * w.conv[:, 0].double()
    total = products.sum(-1)
    conv = total * torch.sigmoid(total)
    error = 1.1 * products.abs().sum(-1) * (shape.taps + 1) * EPS32 + conv.abs() * 12 * EPS32
    sizes = [shape.groups * shape.key_dim] * 2 + [heads * shape.value_dim]
    (q, k, v), (dq, dk, dv) = torch.split(conv, sizes, -1), torch.split(error, sizes, -1)
    q, dq = _unit(q, dq, shape)
    k, dk = _unit(k, dk, shape)
    q, dq = q * shape.key_dim**-0.5, (dq + 2 * EPS32) * shape.key_dim**-0.5
    beta, rate, d_rate = gates(x, w)
    return Mixed(q, k, v.view(rows, heads, -1), beta, rate, dq, dk, dv.view(rows, heads, -1).norm(dim=-1), d_rate)


def apply_rule(m: Mixed, chunked: Sequence[tuple[int, int]] = (), start: Tensor | None = None) -> Ruled:
    """Row by row. chunked: the steps, as first row and end, that go by chunks: they have the errors of that instead of
    those of going row by row. start: the state before."""
    rows, heads, key_dim = m.k.shape
    value_dim, short = m.v.shape[2], key_dim**-0.5
    state = m.k.new_zeros(heads, key_dim, value_dim) if start is None else start
    decay = torch.exp(-m.rate)
    d_decay = decay * (m.d_rate + 4 * EPS32)
    off, d_state = m.k.new_zeros(2, heads)
    seen, d_seen = torch.zeros_like(m.v), torch.zeros_like(m.rate)
    chunks = {i: min(i + CHUNK, end) for first, end in chunked for i in range(first, end, CHUNK)}
    inside = 0  # up to here rows belong to a chunk
    for i in range(rows):
        if i in chunks:
            inside = chunks[i]
            part = slice(i, inside)
            d_seen[part], d_state = chunk_errors(m.q[part], m.k[part], m.v[part], m.beta[part], m.rate[part], state)
        rounding = 0 if i < inside else key_dim * EPS32
        size = state.flatten(1).norm(dim=1) + m.v[i].norm(dim=1)
        state = state * decay[i, :, None, None]
        known = (state * m.k[i, :, :, None]).sum(1)
        state = state + m.k[i, :, :, None] * (m.beta[i, :, None] * (m.v[i] - known))[:, None]
        off = off + size * (d_decay[i] + 4 * m.dk[i] + 16 * EPS32 + rounding) + m.dv[i]
        seen[i] = (state * m.q[i, :, :, None]).sum(1)
        length = state.flatten(1).norm(dim=1)
        d_seen[i] += (off + length * rounding) * short + length * m.dq[i]
        if i + 1 == inside:
            off = off + d_state
    return Ruled(seen, d_seen, state, off)


def exact(x: DeltaInputs, w: DeltaWeights, shape: Shape, chunked: Sequence[tuple[int, int]] = ()) -> Exact:
    """The exact results. chunked: the steps, as (first row, end), that are computed by chunks."""
    mixed = torch.cat([t.flatten(1) for t in (x.q, x.k, x.v)], -1)
    padded = torch.cat([mixed.new_zeros(shape.taps - 1, shape.channels), mixed])
    ruled = apply_rule(mix(x, w, shape, padded), chunked)
    seen = ruled.seen
    root = (seen.pow(2).mean(-1, keepdim=True) + w.eps).sqrt()
    z = x.z.double().flatten(1, 2)
    factor = w.norm.double() * z * torch.sigmoid(z)
    out = seen / root * factor
    relative = (ruled.d_seen[..., None] / root) * (1 + (seen / root).abs() * shape.value_dim**-0.5)
    bound = relative * factor.abs() + out.abs() * (shape.value_dim / 2 + 24) * EPS32
    return Exact(out, bound, ruled.state, ruled.off, padded[len(mixed) :])


def mostly_rounded_once(got: Tensor, want: Tensor) -> bool:
    """Whether half of these bfloat16 values are as near as one rounding leaves them, give or take half as much. The
    bounds above hold for all, and are wide where the norm makes much of little."""
    return bool((got.double() - want).abs().le(1.5 * want.abs() * 2.0**-9).double().mean() >= 0.5)


def _unit(x: Tensor, error: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """L2-normalise, repeated per value head [T, heads, key_dim], and the length of the error [T, heads]."""
    x, error = (t.view(len(t), shape.groups, -1).repeat_interleave(shape.members, 1) for t in (x, error))
    length = (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    off = 2 * error.norm(dim=-1) / length[..., 0] + (shape.key_dim / 2 + 8) * EPS32
    return x / length, off
