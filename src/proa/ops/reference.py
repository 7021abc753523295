"""The specification of every op in plain torch: slow, obviously right, on any device. Never: optimisations.

Other implementations are tested against these functions; the tests' bounds are derived from operand norms and the
type's epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from proa.models.spec import SILU, ExpertGroups, Gating
from proa.ops.caches import KvPages, LatentPages, RecurrentState
from proa.ops.choose import composed_choose
from proa.ops.joined import EmbeddingPart, Peers, joined
from proa.ops.parts import named_parts
from proa.ops.table import (
    Angles,
    AttentionBatch,
    Chosen,
    DeltaInputs,
    DeltaWeights,
    Embedding,
    Experts,
    NewExperts,
    NextRouter,
    Norm,
    Ops,
    Parameters,
    QkNorm,
    RouterRule,
    alone,
)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return ((norm.weight.float() + norm.offset) * normed).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]  # one angle for all heads
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out.to(x.dtype), rest), -1)


def gated(gate_up: Tensor, gating: Gating) -> Tensor:
    """gate_up [T, 2I], gate first, or [T, I] without a gate -> input of down [T, I]."""
    if gating.kind == "relu2":
        return functional.relu(gate_up).square()
    gate, up = gate_up.chunk(2, -1)
    if gating.kind == "silu":
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def route(logits: Tensor, slots: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
    router, wide = rule.router, logits.float()
    scores = torch.softmax(wide, -1) if router.score == "softmax" else torch.sigmoid(wide)
    choice = scores if rule.correction is None else scores + rule.correction
    if router.groups:
        choice = _in_best_groups(choice, router.groups)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(-1, ids)
    if router.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + router.epsilon).clamp(min=router.least)
    poison = torch.where(choice.isnan().any(-1, keepdim=True), math.nan, router.scale)
    if held := router.held:
        ids = torch.where((ids >= held.first) & (ids < held.first + held.count), ids - held.first, -1)
    return torch.where(slots[:, None] < 0, -1, ids), weights * poison


def _in_best_groups(choice: Tensor, groups: ExpertGroups) -> Tensor:
    """Set the choice scores of experts outside the best groups to -inf."""
    by_group = choice.view(len(choice), groups.groups, -1)
    merit = by_group.topk(groups.best_of, -1).values.sum(-1)
    kept = merit.sort(dim=-1, descending=True, stable=True).indices[:, : groups.kept]
    left_out = torch.ones_like(merit, dtype=torch.bool).scatter(-1, kept, False)
    return by_group.masked_fill(left_out[..., None], -math.inf).flatten(-2)


def argmax(logits: Tensor) -> Tensor:
    return torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)


def moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None, gating: Gating = SILU,
) -> Tensor:  # fmt: skip
    """Routed experts. x [T, H]; gate_up [E, 2I, H], gate first; down [E, H, I]; biases [E, 2I], [E, H] -> [T, H]."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        rows, choice = torch.where(ids == expert)
        up_bias, down_bias = (None, None) if biases is None else (bias[expert] for bias in biases)
        h = gated(functional.linear(x[rows], gate_up[expert], up_bias), gating)
        y = functional.linear(h, down[expert], down_bias)
        out.index_add_(0, rows, y.float() * weights[rows, choice, None])
    return out.to(x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def gated_add(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    return x + torch.sigmoid(gate) * y


def add_norm(x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    x = add(x, y)
    return x, rms_norm(x, norm)


def rotate_store(q: Tensor, kv: Tensor, norm: QkNorm | None, angles: Angles, cache: KvPages, slots: Tensor) -> Tensor:
    k, v = kv.chunk(2, 1)
    if norm:
        q, k = (
            rms_norm(t.reshape(len(t), -1, len(weight)), Norm(weight, norm.eps, norm.offset)).view(t.shape)
            for t, weight in ((q, norm.q), (k, norm.k))
        )
    q, k = (rotary(t, angles.cos, angles.sin, angles.interleaved) for t in (q, k))
    write_kv(k, v, cache, slots)
    return q


def write_kv(keys: Tensor, values: Tensor, cache: KvPages, slots: Tensor) -> None:
    for x, pages, scale in ((keys, cache.keys, cache.key_scale), (values, cache.values, cache.value_scale)):
        if pages.dtype is torch.float8_e4m3fn:  # torch has no index_copy_ for float8, so copy bytes
            codes = to_e4m3(x, scale).view(torch.uint8)
            pages.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, codes)
        else:
            pages.flatten(0, 1).index_copy_(0, slots, x.to(pages.dtype))


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """Quantise to float8_e4m3fn, as KvPages specifies."""
    scaled = x.float() * (1 / scale)
    return torch.where(scaled.isfinite(), scaled.clamp(-448, 448), torch.nan).to(torch.float8_e4m3fn)


def _read_kv(pages: Tensor, ids: Tensor, kv_len: int, dtype: torch.dtype) -> Tensor:
    """Gather a sequence's keys or values: [heads, kv_len, D], not yet multiplied by the scale."""
    of_bytes = pages.dtype is torch.float8_e4m3fn
    found = pages.view(torch.uint8)[ids].view(pages.dtype) if of_bytes else pages[ids]
    return found.flatten(0, 1)[:kv_len].transpose(0, 1).to(dtype)


def attention(
    q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    out = torch.empty_like(q)
    for rows, keys, values, mask in _sequences(q, cache, batch, window):
        if sinks is not None:
            out[rows] = _weighted(q[rows], keys, values, mask, scale * cache.key_scale, sinks)[0] * cache.value_scale
            continue
        seen = functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=scale * cache.key_scale,
            enable_gqa=True,
        )
        out[rows] = seen[0].transpose(0, 1) * cache.value_scale
    return out


def attention_with_sums(
    q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attention`, and the logarithms of the softmax's sums, float32 [T, heads], for `merge_attention`. Sinks count in
    the sums: give them with one part of the keys only."""
    out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, keys, values, mask in _sequences(q, cache, batch, window):
        seen, log_sums[rows] = _weighted(q[rows], keys, values, mask, scale * cache.key_scale, sinks)
        out[rows] = seen * cache.value_scale
    return out, log_sums


def merge_attention(parts: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over P disjoint parts of the keys: parts [P, T, heads, D] and the logarithms of their softmax's
    sums, float32 [P, T, heads] (-inf: a part without keys) -> [T, heads, D] and float32 [T, heads]."""
    total = torch.logsumexp(log_sums, 0)
    shares = torch.exp(log_sums - total).masked_fill(log_sums.isneginf(), 0)
    return (parts.float() * shares[..., None]).sum(0).to(parts.dtype), total


def _sequences(
    q: Tensor, cache: KvPages, batch: AttentionBatch, window: int | None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Yield each sequence's rows, keys and values [kv_heads, kv_len, D], and mask."""
    start = 0
    for q_len, kv_len, pages in zip(batch.q_lens, batch.kv_lens, batch.page_table, strict=True):
        keys, values = (_read_kv(t, pages, kv_len, q.dtype) for t in (cache.keys, cache.values))
        yield slice(start, start + q_len), keys, values, _causal(q_len, kv_len, window, q.device)
        start += q_len


def _weighted(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, heads, D] over keys, values [kv_heads, kv_len, D] -> [T, heads, D] and the logarithms of the
    softmax's sums, float32 [T, heads]. One head at a time, to bound the memory of the logits."""
    out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    per_kv_head = q.shape[1] // len(keys)
    for head in range(q.shape[1]):
        logits = q[:, head].float() * scale @ keys[head // per_kv_head].float().T
        if mask is not None:
            logits.masked_fill_(~mask, float("-inf"))
        sink = logits.new_tensor(float("-inf")) if sinks is None else sinks[head].float()
        most = torch.maximum(logits.amax(-1, keepdim=True), sink)
        weights = logits.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True) + torch.exp(sink - most)
        out[:, head] = weights @ values[head // per_kv_head].float() / total
        log_sums[:, head] = (most + total.log())[:, 0]
    return out, log_sums


def _causal(q_len: int, kv_len: int, window: int | None, device: torch.device) -> Tensor | None:
    """The causal mask [q_len, kv_len], True where a query (at the last q_len positions) may attend; None: anywhere."""
    if q_len == 1 and (window is None or kv_len <= window):
        return None
    distance = torch.arange(kv_len - q_len, kv_len, device=device)[:, None] - torch.arange(kv_len, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def latent_store(q: Tensor, kv: Tensor, norm: Norm, angles: Angles, cache: LatentPages, slots: Tensor) -> Tensor:
    rank, rotary_dim = len(norm.weight), 2 * angles.cos.shape[-1]
    latents = rms_norm(kv[:, :rank], norm)
    keys = rotary(kv[:, None, rank:], angles.cos, angles.sin, angles.interleaved)[:, 0]
    cache.rows.flatten(0, 1).index_copy_(0, slots, torch.cat((latents, keys), -1))
    plain = q.shape[-1] - rotary_dim
    return torch.cat((q[..., :plain], rotary(q[..., plain:], angles.cos, angles.sin, angles.interleaved)), -1)


def gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def gated_delta(x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, batch: AttentionBatch) -> Tensor:
    groups, key_dim = x.q.shape[1:]
    per_group, dim = x.v.shape[2:]
    past, taps = weights.conv.shape[-1] - 1, weights.conv[:, 0]
    beta, steps = torch.sigmoid(x.b.float()).flatten(1), functional.softplus(x.a.float().flatten(1) + weights.dt_bias)
    decay = torch.exp(-torch.exp(weights.a_log) * steps)
    mixed = torch.cat([t.flatten(1) for t in (x.q, x.k, x.v)], -1)
    out = torch.empty(len(mixed), groups * per_group, dim, device=mixed.device)
    start = 0
    for q_len, kv_len, slot in zip(batch.q_lens, batch.kv_lens, batch.states, strict=True):
        rows = slice(start, start + q_len)
        rule, tail = state.rule[slot], state.tail[slot]
        if q_len == kv_len:
            rule.zero_()
            tail.zero_()
        seen = torch.cat((tail, mixed[rows].to(tail.dtype)))
        tail.copy_(seen[q_len:])
        windows = seen.float().unfold(0, past + 1, 1)  # [q_len, channels, taps]
        conv = functional.silu((windows * taps).sum(-1))
        q, k, v = torch.split(conv, [groups * key_dim, groups * key_dim, groups * per_group * dim], -1)
        q, k = (_unit(t.view(q_len, groups, key_dim)).repeat_interleave(per_group, 1) for t in (q, k))
        q, v = q * key_dim**-0.5, v.view(q_len, groups * per_group, dim)
        for i in range(q_len):
            rule *= decay[start + i, :, None, None]
            known = (rule * k[i, :, :, None]).sum(1)
            rule += k[i, :, :, None] * (beta[start + i, :, None] * (v[i] - known))[:, None]
            out[start + i] = (rule * q[i, :, :, None]).sum(1)
        start += q_len
    normed = rms_norm(out, Norm(weights.norm, weights.eps)) * functional.silu(x.z.float().flatten(1, 2))
    return normed.to(x.q.dtype).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class TorchLinear:
    """Fused linear layers: each part's rows are a view of one matrix."""

    def __init__(self, outs: Mapping[str, int], inputs: int, bias: bool, dtype: torch.dtype) -> None:
        self._outs = dict(outs)
        self.weight = torch.empty(sum(outs.values()), inputs, dtype=dtype)
        self.bias = torch.empty(sum(outs.values()), dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def parameters(self) -> Parameters:
        yield from named_parts(self._outs, "weight", self.weight)
        yield from named_parts(self._outs, "bias", self.bias)


class TorchHead(TorchLinear):
    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__({"head": vocab}, hidden, False, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).float()


class TorchRouter(TorchLinear):
    def __init__(self, experts: int, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__({"router": experts}, hidden, bias, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias)


class TorchMlp:
    def __init__(self, hidden: int, width: int, bias: bool, gating: Gating, dtype: torch.dtype) -> None:
        self._gating = gating
        self._gate_up = TorchLinear(dict.fromkeys(gating.inputs, width), hidden, bias, dtype)
        self._down = TorchLinear({"down": hidden}, width, bias, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gated(self._gate_up(x), self._gating))

    def parameters(self) -> Parameters:
        yield from self._gate_up.parameters()
        yield from self._down.parameters()


class TorchLatentMaps:
    """W_k and W_v of latent attention as one tensor [heads, K + V, rank]."""

    def __init__(self, heads: int, keys: int, values: int, rank: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(heads * (keys + values), rank, dtype=dtype)
        self._keys, self._values = torch.split(self.weight.view(heads, keys + values, rank), [keys, values], 1)

    def attend(self, q: Tensor, cache: LatentPages, batch: AttentionBatch, scale: float) -> Tensor:
        rows = cache.rows[:, :, None]  # keys of all heads; their values are the first `rank` dims
        return self.values(attention(self.queries(q), KvPages(rows, rows), batch, scale, None)[..., : cache.rank])

    def queries(self, q: Tensor) -> Tensor:
        """q [T, heads, K + R] -> [T, heads, rank + R]: W_k^T times the first K dims of each head; the last R copied."""
        plain = self._keys.shape[1]
        return torch.cat((torch.einsum("thk,hkr->thr", q[..., :plain], self._keys), q[..., plain:]), -1)

    def values(self, seen: Tensor) -> Tensor:
        """seen [T, heads, rank] -> [T, heads * V]: W_v times each head's weighted sum of latents."""
        return torch.einsum("thr,hvr->thv", seen, self._values).flatten(1)

    def parameters(self) -> Parameters:
        yield "kv_b.weight", self.weight


class TorchUnderway:
    """Experts that were computed when they were started."""

    def __init__(self, routed: Tensor) -> None:
        self._routed = routed

    def groups(self) -> Iterator[None]:
        return iter(())

    def finish(self, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        if shared is None:
            return self._routed
        return add(self._routed, shared) if gate is None else gated_add(self._routed, gate, shared)


class TorchExperts:
    """All experts of one layer, stacked."""

    def __init__(
        self, experts: int, hidden: int, width: int, bias: bool, gating: Gating, dtype: torch.dtype
    ) -> None:  # fmt: skip
        self._gating = gating
        sizes = (len(gating.inputs) * width, hidden)
        self.gate_up = torch.empty(experts, sizes[0], hidden, dtype=dtype)
        self.down = torch.empty(experts, hidden, width, dtype=dtype)
        self.biases = tuple(torch.empty(experts, n, dtype=dtype) for n in sizes) if bias else ()

    @property
    def residency(self) -> None:
        return None

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        """Do nothing: these experts' weights need no prefetch."""

    def start(self, x: Tensor, chosen: Chosen) -> TorchUnderway:
        weights = self.gate_up, self.down
        biases = (self.biases[0], self.biases[1]) if self.biases else None
        return TorchUnderway(moe_experts(x, chosen.ids, chosen.weights, *weights, biases, self._gating))

    def parameters(self) -> Parameters:
        parts = self._gating.inputs
        for e, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield from (
                (f"{e}.{part}.weight", rows) for part, rows in zip(parts, gate_up.chunk(len(parts)), strict=True)
            )
            yield f"{e}.down.weight", down
        for e, (up_bias, down_bias) in enumerate(zip(*self.biases, strict=True)):
            yield from ((f"{e}.{part}.bias", rows) for part, rows in zip(parts, up_bias.chunk(len(parts)), strict=True))
            yield f"{e}.down.bias", down_bias


class TorchEmbedding:
    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(vocab, hidden, dtype=dtype)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]

    def logits(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).float()

    def parameters(self) -> Parameters:
        yield "weight", self.weight


class TorchMaps:
    """Weights as plain tensors of one type."""

    def __init__(self, dtype: torch.dtype, new_experts: NewExperts | None, peers: Peers | None) -> None:
        self._dtype, self._new_experts, self._peers = dtype, new_experts, peers

    def linear(self, outs: Mapping[str, int], inputs: int, bias: bool) -> TorchLinear:
        return TorchLinear(outs, inputs, bias, self._dtype)

    def router(self, experts: int, hidden: int, bias: bool = False) -> TorchRouter:
        return TorchRouter(experts, hidden, bias, self._dtype)

    def head(self, vocab: int, hidden: int) -> TorchHead:
        return TorchHead(vocab, hidden, self._dtype)

    def mlp(self, hidden: int, width: int, bias: bool, gating: Gating = SILU) -> TorchMlp:
        return TorchMlp(hidden, width, bias, gating, self._dtype)

    def experts(
        self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU, *, block: int = 0
    ) -> Experts:  # fmt: skip
        if self._new_experts is not None:
            return self._new_experts(experts, hidden, width, bias, gating, block=block)
        return TorchExperts(experts, hidden, width, bias, gating, self._dtype)

    def latent(self, heads: int, keys: int, values: int, rank: int) -> TorchLatentMaps:
        return TorchLatentMaps(heads, keys, values, rank, self._dtype)

    def embedding(self, vocab: int, hidden: int, tied: bool) -> Embedding:
        made = TorchEmbedding(vocab, hidden, self._dtype)
        return made if self._peers is None else EmbeddingPart(made, self._peers.first_token, vocab)

    def vector(self, width: int) -> Tensor:
        return torch.empty(width, dtype=self._dtype)

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape)


def reference(dtype: torch.dtype, new_experts: NewExperts | None = None, peers: Peers | None = None) -> Ops:
    """All ops in plain torch, with weights of `dtype`; `new_experts`, if given, makes the routed experts. peers: the
    other ranks; None: there are none."""
    ops = Ops(
        maps=TorchMaps(dtype, new_experts, peers),
        join=alone,
        gather=alone,
        new_block=lambda: None,
        rms_norm=rms_norm,
        add=add,
        scale=torch.mul,
        add_norm=add_norm,
        rotate_store=rotate_store,
        choose=composed_choose(rms_norm, add_norm, route),
        argmax=argmax,
        attention=attention,
        gate=gate,
        gated_delta=gated_delta,
        latent_store=latent_store,
    )
    return ops if peers is None else joined(ops, route, peers)
