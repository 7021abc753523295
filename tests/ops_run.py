"""Every implementation of the ops behind one interface that computes at once, for tests/ops/test_ops.py."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.models.spec import SILU, Gating
from proa.native.pool import Pool
from proa.ops import reference
from proa.ops.caches import KvPages, LatentPages, RecurrentState
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory
from proa.ops.table import (
    Angles,
    AttentionBatch,
    Chosen,
    DeltaInputs,
    DeltaWeights,
    LatentMaps,
    Maps,
    Norm,
    Parameters,
    RouterRule,
)


def fill(parameters: Parameters, values: dict[str, Tensor]) -> None:
    """Write values to a parameter, like the loader."""
    for name, target in parameters:
        if isinstance(target, Tensor):
            target.copy_(values[name])
        else:
            target.expect("BF16")
            target.write(0, values[name])


class TorchRun:
    """Plain torch."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return reference.rms_norm(x, Norm(weight, eps, offset))

    rotary = staticmethod(reference.rotary)
    route = staticmethod(reference.route)
    argmax = staticmethod(reference.argmax)
    add = staticmethod(reference.add)
    scale = staticmethod(reference.reference(torch.float32).scale)
    write_kv = staticmethod(reference.write_kv)
    attention = staticmethod(reference.attention)
    gate = staticmethod(reference.gate)
    gated_delta = staticmethod(reference.gated_delta)
    latent_store = staticmethod(reference.latent_store)

    def _maps(self, dtype: torch.dtype) -> Maps:
        return reference.reference(dtype).maps

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(self._maps(x.dtype), x, weight, bias)

    def router(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return router(self._maps(x.dtype), x, weight, bias)

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
        shared: Tensor | None = None, gate: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return experts(self._maps(x.dtype), x, ids, weights, gate_up, down, shared, gate)

    def mlp(self, x: Tensor, values: dict[str, Tensor], gating: Gating = SILU) -> Tensor:
        return mlp(self._maps(x.dtype), x, values, gating)

    def biased_experts(
        self, x: Tensor, chosen: Chosen, values: dict[str, Tensor], gating: Gating
    ) -> Tensor:  # fmt: skip
        return biased_experts(self._maps(x.dtype), x, chosen, values, gating)

    def latent_maps(self, q: Tensor, seen: Tensor, weight: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        return latent_maps(self._maps(q.dtype), q, seen, weight, keys)

    def latent_attention(
        self, q: Tensor, weight: Tensor, keys: int, cache: LatentPages, batch: AttentionBatch, scale: float
    ) -> Tensor:
        return latent_heads(self._maps(q.dtype), weight, keys).attend(q, cache, batch, scale)


def linear(maps: Maps, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = maps.linear({"a": len(weight)}, weight.shape[1], bias is not None)
    fill(made.parameters(), {"a.weight": weight} | ({"a.bias": bias} if bias is not None else {}))
    return made(x)


def router(maps: Maps, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = maps.router(*weight.shape, bias is not None)
    fill(made.parameters(), {"router.weight": weight} | ({"router.bias": bias} if bias is not None else {}))
    return made(x)


def experts(
    maps: Maps, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    shared: Tensor | None = None, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    count, hidden, width = down.shape
    made = maps.experts(count, hidden, width)
    values = {}
    for e in range(count):
        values |= {
            f"{e}.gate.weight": gate_up[e, :width],
            f"{e}.up.weight": gate_up[e, width:],
            f"{e}.down.weight": down[e],
        }
    fill(made.parameters(), values)
    total = made.start(x, Chosen(ids, weights)).finish(shared, gate)
    assert isinstance(total, Tensor)
    return total


def mlp(maps: Maps, x: Tensor, values: dict[str, Tensor], gating: Gating) -> Tensor:
    width, hidden = values["up.weight"].shape
    made = maps.mlp(hidden, width, "up.bias" in values, gating)
    fill(made.parameters(), values)
    return made(x)


def latent_heads(maps: Maps, weight: Tensor, keys: int) -> LatentMaps:
    """Latent maps with weight [heads, keys + values, rank], written in pieces that are not whole heads."""
    heads, rows, rank = weight.shape
    made = maps.latent(heads, keys, rows - keys, rank)
    ((_, target),) = made.parameters()
    if isinstance(target, Tensor):
        target.copy_(weight.flatten(0, 1))
    else:
        first = 0
        for part in weight.flatten(0, 1).split(rows - 1):
            target.write(first, part)
            first += len(part)
    return made


def latent_maps(maps: Maps, q: Tensor, seen: Tensor, weight: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    made = latent_heads(maps, weight, keys)
    return made.queries(q), made.values(seen)


def biased_experts(maps: Maps, x: Tensor, chosen: Chosen, values: dict[str, Tensor], gating: Gating) -> Tensor:
    """Experts with biases; values: by expert and name."""
    width, hidden = values["0.gate.weight"].shape
    made = maps.experts(len(values) // 6, hidden, width, True, gating)
    fill(made.parameters(), values)
    total = made.start(x, chosen).finish(None, None)
    assert isinstance(total, Tensor)
    return total


class NativeRun:
    """Records one op for the kernels of `isa` and runs it. Results are copies, inputs stay as they are."""

    def __init__(self, isa: str) -> None:
        self._pool = Pool([[0]], isa=isa, pin=False)

    def _record(self, rows: int, sequences: int = 1, pages: int = 1) -> tuple[Recorder, CpuOps]:
        recorder = Recorder(self._pool, Memory(self._pool, [None]), rows, sequences, pages)
        return recorder, CpuOps(recorder)

    @staticmethod
    def _run(recorder: Recorder) -> None:
        recorder.program.run(0, len(recorder.program), recorder.rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        recorder, ops = self._record(len(x))
        y = ops.rms_norm(x, Norm(weight, eps, offset))
        self._run(recorder)
        return y.clone()

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        recorder, ops = self._record(len(x))
        y = ops.rotary(x.clone(), cos, sin, interleaved)
        self._run(recorder)
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        recorder, ops = self._record(len(x))
        out = ops.add(x.clone(), y)
        self._run(recorder)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        recorder, ops = self._record(len(x))
        out = ops.scale(x.clone(), factor)
        self._run(recorder)
        return out

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        recorder, ops = self._record(len(x))
        out = ops.gate(x.clone(), gate)
        self._run(recorder)
        return out

    def gated_delta(
        self, x: DeltaInputs, weights: DeltaWeights, state: RecurrentState, batch: AttentionBatch
    ) -> Tensor:
        recorder, ops = self._record(len(x.q), len(batch.q_lens), max(batch.kv_lens))
        y = ops.gated_delta(x, weights, state, batch)
        lens = [torch.tensor(n, dtype=torch.int32) for n in (batch.q_lens, batch.kv_lens, batch.states)]
        table = torch.zeros(len(batch.q_lens), max(batch.kv_lens), dtype=torch.int32)
        recorder.program.set_batch(
            len(batch.q_lens), *(n.data_ptr() for n in lens), table.data_ptr(), table.shape[1], 1, 1
        )
        self._run(recorder)
        return y.clone()

    def route(self, logits: Tensor, slots: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        recorder, ops = self._record(len(logits))
        ids, weights = ops.route(logits, slots, rule)
        self._run(recorder)
        return ids.long(), weights.clone()

    def argmax(self, logits: Tensor) -> Tensor:
        recorder, ops = self._record(len(logits))
        ids = ops.argmax(logits)
        self._run(recorder)
        return ids.clone()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        recorder, ops = self._record(len(x))
        y = linear(ops.table().maps, x, weight, bias)
        self._run(recorder)
        return y.clone()

    def router(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        recorder, ops = self._record(len(x))
        y = router(ops.table().maps, x, weight, bias)
        self._run(recorder)
        return y.clone()

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
        shared: Tensor | None = None, gate: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        recorder, ops = self._record(len(x))
        narrow, weights = ids.to(torch.int32).contiguous(), weights.contiguous()
        y = experts(ops.table().maps, x, narrow, weights, gate_up, down, shared, gate)
        self._run(recorder)
        return y.clone()

    def mlp(self, x: Tensor, values: dict[str, Tensor], gating: Gating = SILU) -> Tensor:
        recorder, ops = self._record(len(x))
        y = mlp(ops.table().maps, x, values, gating)
        self._run(recorder)
        return y.clone()

    def biased_experts(self, x: Tensor, chosen: Chosen, values: dict[str, Tensor], gating: Gating) -> Tensor:
        recorder, ops = self._record(len(x))
        narrow = Chosen(chosen.ids.to(torch.int32).contiguous(), chosen.weights.contiguous())
        y = biased_experts(ops.table().maps, x, narrow, values, gating)
        self._run(recorder)
        return y.clone()

    def write_kv(self, keys: Tensor, values: Tensor, cache: KvPages, slots: Tensor) -> None:
        recorder, ops = self._record(len(keys))
        ops.write_kv(keys, values, cache, slots)
        self._run(recorder)

    def latent_store(
        self, q: Tensor, kv: Tensor, norm: Norm, angles: Angles, cache: LatentPages, slots: Tensor
    ) -> Tensor:
        recorder, ops = self._record(len(q))
        kv = kv.clone()
        y = ops.latent_store(q.clone(), kv, norm, angles, cache, slots)
        self._run(recorder)
        return y

    def latent_maps(self, q: Tensor, seen: Tensor, weight: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        recorder, ops = self._record(len(q))
        queries, values = latent_maps(ops.table().maps, q, seen, weight, keys)
        self._run(recorder)
        return queries.clone(), values.clone()

    def latent_attention(
        self, q: Tensor, weight: Tensor, keys: int, cache: LatentPages, batch: AttentionBatch, scale: float
    ) -> Tensor:
        recorder, ops = self._record(len(q), len(batch.q_lens), max(map(len, batch.page_table)))
        y = latent_heads(ops.table().maps, weight, keys).attend(q, cache, batch, scale)
        self._run_batch(recorder, batch, cache.rows)
        return y.clone()

    def attention(
        self, q: Tensor, cache: KvPages, batch: AttentionBatch, scale: float, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        most = max(len(pages) for pages in batch.page_table)
        recorder, ops = self._record(len(q), len(batch.q_lens), most)
        y = ops.attention(q, cache, batch, scale, window, sinks)
        self._run_batch(recorder, batch, cache.keys)
        return y.clone()

    def _run_batch(self, recorder: Recorder, batch: AttentionBatch, cache: Tensor) -> None:
        """cache: [pages, page_tokens, ...]."""
        most = max(len(pages) for pages in batch.page_table)
        table = torch.zeros(len(batch.q_lens), most, dtype=torch.int32)
        for row, pages in zip(table, batch.page_table, strict=True):
            row[: len(pages)] = pages
        q_lens, kv_lens = (torch.tensor(n, dtype=torch.int32) for n in (batch.q_lens, batch.kv_lens))
        pages, page_tokens = cache.shape[:2]
        recorder.program.set_batch(
            len(q_lens), q_lens.data_ptr(), kv_lens.data_ptr(), 0, table.data_ptr(), most, pages, page_tokens
        )
        self._run(recorder)
