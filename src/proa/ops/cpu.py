"""The native ops of the CPU: bfloat16 activations, packed weights. They record instead of computing: every call appends
an operation over fixed buffers to a program, which engine/executors/recorded.py replays for each step. Never: maths.

While recording, activations are tensors with the largest number of rows of a step; a replay uses the step's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from proa.models.spec import SILU, Gating
from proa.native.formats import PANEL_ROWS
from proa.native.program import Cache, Delta
from proa.native.weights import Matrix
from proa.ops.caches import KvPages, LatentPages, RecurrentState
from proa.ops.choose import composed_choose
from proa.ops.cpu_latent import CpuLatentMaps, latent_cache
from proa.ops.gated import GatedBiases, GatedStacks
from proa.ops.packed import RowSink, Stack
from proa.ops.parts import named_parts
from proa.ops.recorder import Recorder as Recorder
from proa.ops.recorder import rows_of
from proa.ops.routing import native_rule
from proa.ops.table import (
    Angles,
    AttentionBatch,
    Chosen,
    DeltaInputs,
    DeltaWeights,
    NextRouter,
    Norm,
    Ops,
    Parameters,
    QkNorm,
    RouterRule,
    alone,
)


class CpuOps:
    """Implements the functions of ops/table.py by recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._to = recorder
        self._turns: dict[tuple[float, int], tuple[Tensor, Tensor]] = {}  # (factor, rows) -> cos and sin of `scale`

    def table(self) -> Ops:
        return Ops(
            maps=CpuMaps(self._to),
            join=alone,
            gather=alone,
            new_block=self._to.new_block,
            rms_norm=self.rms_norm,
            add=self.add,
            scale=self.scale,
            add_norm=self.add_norm,
            rotate_store=self.rotate_store,
            choose=composed_choose(self.rms_norm, self.add_norm, self.route),
            argmax=self.argmax,
            attention=self.attention,
            gate=self.gate,
            gated_delta=self.gated_delta,
            latent_store=self.latent_store,
        )

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        groups, width = (x.shape[1], x.shape[2]) if x.dim() == 3 else (1, x.shape[1])
        apart = x.stride(1) if groups > 1 else width
        out = self._to.new(groups * width)
        rows = rows_of(x) if apart == width else rows_of(x[:, 0])
        self._to.program.add_rms_norm(
            rows, norm.weight.data_ptr(), groups, width, norm.eps, rows_of(out), norm.offset,
            0 if apart == width else apart,
        )  # fmt: skip
        return out.view(x.shape)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Rotate x [T, heads, D] in place."""
        heads, dim = x.shape[1:]
        self._to.program.add_rotary(rows_of(x), cos.data_ptr(), sin.data_ptr(), heads, dim, cos.shape[1], interleaved)
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self._to.program.add_add(rows_of(x), rows_of(y), x.shape[1])
        return x

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Record a rotation by cos = factor and sin = 0, which multiplies every element, in float32."""
        pairs = max(n for n in (16, 8, 4, 2, 1) if x.shape[1] % (2 * n) == 0)
        key = factor, pairs * self._to.rows
        if key not in self._turns:
            cos = torch.full((self._to.rows, pairs), factor)
            self._turns[key] = self._to.keep(cos), self._to.keep(torch.zeros_like(cos))
        return self.rotary(x.view(len(x), -1, 2 * pairs), *self._turns[key], False).view(x.shape)

    def add_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        x = self.add(x, y)
        return x, self.rms_norm(x, norm)

    def rotate_store(
        self, q: Tensor, kv: Tensor, norm: QkNorm | None, angles: Angles, cache: KvPages, slots: Tensor
    ) -> Tensor:
        k, v = kv.chunk(2, 1)
        if norm:
            q, k = (
                self.rms_norm(_in_groups(t, len(weight)), Norm(weight, norm.eps, norm.offset)).view(t.shape)
                for t, weight in ((q, norm.q), (k, norm.k))
            )
        q, k = (self.rotary(t, angles.cos, angles.sin, angles.interleaved) for t in (q, k))
        self.write_kv(k, v, cache, slots)
        return q

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        heads, dim = x.shape[1:]
        self._to.program.add_gate(rows_of(x), rows_of(gate[:, 0]), heads, dim, gate.stride(1))
        return x

    def gated_delta(
        self, x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, batch: AttentionBatch
    ) -> Tensor:
        """`batch` is ignored: the executor sets the program's batch before each step."""
        to = self._to
        (_, groups, key_dim), (per_group, dim) = x.q.shape, x.v.shape[2:]
        by_tap = to.keep(weights.conv[:, 0].t().contiguous())
        mixed, out = to.new(by_tap.shape[1], torch.float32), to.new(groups * per_group * dim)
        to.program.add_gated_delta(
            Delta(
                groups=groups, per_group=per_group, key_dim=key_dim, value_dim=dim, taps=len(by_tap),
                q=x.q.data_ptr(), k=x.k.data_ptr(), v=x.v.data_ptr(), z=x.z.data_ptr(),
                row_stride=x.q.stride(0), group_stride=x.q.stride(1),
                b=x.b.data_ptr(), a=x.a.data_ptr(),
                gates_row_stride=x.b.stride(0), gates_group_stride=x.b.stride(1),
                conv=by_tap.data_ptr(), a_log=weights.a_log.data_ptr(), dt_bias=weights.dt_bias.data_ptr(),
                norm=weights.norm.data_ptr(), eps=weights.eps,
                rule=state.rule.data_ptr(), tail=state.tail.data_ptr(), slots=len(state.rule),
                mixed=mixed.data_ptr(), out=out.data_ptr(), out_stride=out.stride(0),
            )
        )  # fmt: skip
        return out

    def route(self, logits: Tensor, slots: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        """`slots` is ignored: a program has no padding rows."""
        ids, weights = self._to.new(rule.top_k, torch.int32), self._to.new(rule.top_k, torch.float32)
        if rule.router.held:
            raise ValueError(f"the native kernels do not route for one of several ranks: {rule.router.held}")
        correction = None if rule.correction is None else self._to.keep(rule.correction).data_ptr()
        native = native_rule(logits.shape[1], rule, correction)
        self._to.program.add_route(rows_of(logits), native, ids.data_ptr(), weights.data_ptr())
        return ids, weights

    def argmax(self, logits: Tensor) -> Tensor:
        ids = self._to.new(1, torch.int32)[:, 0]
        self._to.program.add_argmax(rows_of(logits), logits.shape[1], ids.data_ptr())
        return ids

    def write_kv(self, keys: Tensor, values: Tensor, cache: KvPages, slots: Tensor) -> None:
        self._to.program.add_write_kv(_cache(cache), rows_of(keys), rows_of(values), slots.data_ptr())

    def attention(
        self, q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`batch` is ignored: the executor sets the program's batch before each step."""
        heads, dim = q.shape[1:]
        out = self._to.new(heads * dim)
        address = 0 if sinks is None else self._to.keep(sinks).data_ptr()
        self._to.program.add_attention(_cache(cache), rows_of(q), rows_of(out), heads, scale, window, address)
        return out.view(q.shape)

    def latent_store(
        self, q: Tensor, kv: Tensor, norm: Norm, angles: Angles, cache: LatentPages, slots: Tensor
    ) -> Tensor:
        rotary_dim = 2 * angles.cos.shape[1]
        latents = self.rms_norm(kv[:, : cache.rank], norm)
        keys = self.rotary(kv[:, None, cache.rank :], angles.cos, angles.sin, angles.interleaved)[:, 0]
        self._to.program.add_write_latent(latent_cache(cache), rows_of(latents), rows_of(keys), slots.data_ptr())
        heads, dim = q.shape[1:]
        last = rows_of(q[:, 0, dim - rotary_dim :])
        self._to.program.add_rotary(
            last, angles.cos.data_ptr(), angles.sin.data_ptr(), heads, dim, rotary_dim // 2, angles.interleaved
        )
        return q


def _in_groups(x: Tensor, width: int) -> Tensor:
    """x [T, heads, D] unchanged if width is D, else reshaped to one group of all heads, which must be contiguous."""
    return x if x.shape[2] == width else x.reshape(len(x), -1, width)


def _cache(cache: KvPages) -> Cache:
    pages, page_tokens, heads, dim = cache.keys.shape
    return Cache(
        cache.keys.data_ptr(), cache.values.data_ptr(), pages, page_tokens, heads, dim,
        e4m3=cache.keys.dtype is torch.float8_e4m3fn, key_scale=cache.key_scale, value_scale=cache.value_scale,
    )  # fmt: skip


class CpuLinear:
    """Fused linear layers: one packed matrix if all parts have one format and begin at whole panels, else one each."""

    def __init__(self, to: Recorder, outs: Mapping[str, int], inputs: int, bias: bool, wide: bool = False) -> None:
        self._to, self._outs, self._inputs = to, dict(outs), inputs
        self._dtype = torch.float32 if wide else torch.bfloat16
        self.bias = to.keep(torch.zeros(sum(outs.values()), dtype=torch.float32)) if bias else None
        self._stored: dict[str, str] = {}
        self._stacks: list[tuple[Stack, int]] = []  # (matrix, its first output)
        self._where: dict[str, tuple[Stack, int]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        self._decide()
        y = self._to.new(sum(self._outs.values()), self._dtype)
        for stack, first in self._stacks:
            bias = self.bias[first:].data_ptr() if self.bias is not None else 0
            self._to.program.add_linear(stack.matrix, rows_of(x), rows_of(y[:, first:]), stack.rows, bias)
        return y

    @property
    def whole(self) -> Matrix:
        """The packed matrix of a layer with a single part."""
        self._decide()
        ((stack, _),) = self._stacks
        return stack.matrix

    def sink(self, name: str) -> RowSink:
        def expect(stored: str) -> None:
            self._stored[name] = stored

        def where() -> tuple[Stack, int]:
            self._decide()
            return self._where[name]

        return RowSink(self._outs[name], self._inputs, expect, where)

    def _decide(self) -> None:
        if self._stacks:
            return
        aligned = all(rows % PANEL_ROWS == 0 for rows in list(self._outs.values())[:-1])
        if aligned and len(set(self._stored.values())) <= 1:
            groups: list[Sequence[str]] = [list(self._outs)]
        else:
            groups = [[name] for name in self._outs]
        first = 0
        for names in groups:
            stack = Stack(self._to.memory, 1, sum(self._outs[name] for name in names), self._inputs)
            self._stacks.append((stack, first))
            row = 0
            for name in names:
                stack.expect(self._stored.get(name, "BF16"))
                self._where[name] = stack, row
                row += self._outs[name]
            first += stack.rows

    def parameters(self) -> Parameters:
        for name in self._outs:
            yield f"{name}.weight", self.sink(name)
        yield from named_parts(self._outs, "bias", self.bias)


class CpuGated:
    """One or more MLPs of equal shape, packed as a stack."""

    def __init__(self, to: Recorder, count: int, hidden: int, width: int, bias: bool, gating: Gating) -> None:
        biases = GatedBiases(count, hidden, width, gating) if bias else None
        self._to, self.stacks = to, GatedStacks(to.memory, count, hidden, width, biases, gating)

    def record(self, x: Tensor, ids: Tensor | None, weights: Tensor | None) -> Tensor:
        y = self._to.new(self.stacks.hidden)
        if (biases := self.stacks.biases) is not None:
            self._to.keep(biases.up)
            self._to.keep(biases.down)
        experts = self.stacks.experts()
        if ids is None or weights is None:
            self._to.program.add_moe(experts, rows_of(x), rows_of(y))
        else:
            self._to.program.add_moe(experts, rows_of(x), rows_of(y), ids.data_ptr(), weights.data_ptr(), ids.shape[1])
        return y


class CpuMlp:
    def __init__(self, to: Recorder, hidden: int, width: int, bias: bool, gating: Gating) -> None:
        self._gated = CpuGated(to, 1, hidden, width, bias, gating)

    def __call__(self, x: Tensor) -> Tensor:
        return self._gated.record(x, None, None)

    def parameters(self) -> Parameters:
        yield from self._gated.stacks.sinks(0)


class CpuUnderway:
    """Recorded experts; `finish` records the addition of the shared expert."""

    def __init__(self, to: Recorder, routed: Tensor) -> None:
        self._program, self._routed = to.program, routed

    def groups(self) -> Iterator[None]:
        return iter(())

    def finish(self, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        routed, width = self._routed, self._routed.shape[1]
        if shared is not None and gate is not None:
            self._program.add_gated_add(rows_of(routed), rows_of(gate), rows_of(shared), width)
        elif shared is not None:
            self._program.add_add(rows_of(routed), rows_of(shared), width)
        return routed


class CpuExperts:
    def __init__(self, to: Recorder, experts: int, hidden: int, width: int, bias: bool, gating: Gating) -> None:
        self._to, self._experts = to, experts
        self._gated = CpuGated(to, experts, hidden, width, bias, gating)

    @property
    def residency(self) -> None:
        return None

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        """Do nothing: these experts' weights need no prefetch."""

    def start(self, x: Tensor, chosen: Chosen) -> CpuUnderway:
        return CpuUnderway(self._to, self._gated.record(x, chosen.ids, chosen.weights))

    def parameters(self) -> Parameters:
        for e in range(self._experts):
            yield from ((f"{e}.{name}", sink) for name, sink in self._gated.stacks.sinks(e))


class CpuEmbedding:
    """An embedding: a plain table; if tied, the packed matrix of the head, from which rows are unpacked."""

    def __init__(self, to: Recorder, vocab: int, hidden: int, tied: bool) -> None:
        self._to, self._hidden = to, hidden
        self._weight = (
            CpuLinear(to, {"embed": vocab}, hidden, False, wide=True)
            if tied
            else torch.empty(vocab, hidden, dtype=torch.bfloat16)
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        if isinstance(self._weight, Tensor):
            return self._to.take(self._weight, tokens)
        out = self._to.new(self._hidden)
        self._to.program.add_lookup(self._weight.whole, tokens.data_ptr(), rows_of(out))
        return out

    def logits(self, x: Tensor) -> Tensor:
        if isinstance(self._weight, Tensor):
            raise ValueError("the head of this model is not tied to its embedding")
        return self._weight(x)

    def parameters(self) -> Parameters:
        yield "weight", self._weight if isinstance(self._weight, Tensor) else self._weight.sink("embed")


class CpuMaps:
    def __init__(self, to: Recorder) -> None:
        self._to = to

    def linear(self, outs: Mapping[str, int], inputs: int, bias: bool) -> CpuLinear:
        return CpuLinear(self._to, outs, inputs, bias)

    def router(self, experts: int, hidden: int, bias: bool = False) -> CpuLinear:
        return CpuLinear(self._to, {"router": experts}, hidden, bias, wide=True)

    def head(self, vocab: int, hidden: int) -> CpuLinear:
        return CpuLinear(self._to, {"head": vocab}, hidden, False, wide=True)

    def mlp(self, hidden: int, width: int, bias: bool, gating: Gating = SILU) -> CpuMlp:
        return CpuMlp(self._to, hidden, width, bias, gating)

    def experts(
        self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU, *, block: int = 0
    ) -> CpuExperts:  # fmt: skip
        return CpuExperts(self._to, experts, hidden, width, bias, gating)

    def latent(self, heads: int, keys: int, values: int, rank: int) -> CpuLatentMaps:
        return CpuLatentMaps(self._to, heads, keys, values, rank)

    def embedding(self, vocab: int, hidden: int, tied: bool) -> CpuEmbedding:
        return CpuEmbedding(self._to, vocab, hidden, tied)

    def vector(self, width: int) -> Tensor:
        return self._to.keep(torch.empty(width, dtype=torch.bfloat16))

    def numbers(self, *shape: int) -> Tensor:
        return self._to.keep(torch.empty(shape))
