"""The routed experts of a batch that the GPU can read, and the sum of everything that a MoE layer adds up.

Belongs here: which kernels run a batch, the memory between them. Never: experts of the CPU; their sum comes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.faults import CPU, IDS, INPUT, LAYER, OWN, SHARED, SOURCES, LayerFaults
from proa.ops.residency import ExpertShape, Located
from proa.ops.triton.experts_few import down, gate_up
from proa.ops.triton.experts_grouped import Groups, block_tokens, down_grouped, gate_up_grouped, group, groups
from proa.ops.triton.variant import Variant

FEW_PAIRS = 64  # up to here, hardly two pairs share an expert
_COLUMNS, _WARPS = 512, 4
_CPU, _SHARED, _INPUT = tl.constexpr(CPU), tl.constexpr(SHARED), tl.constexpr(INPUT)
_LAYER, _SOURCES, _OWN, _IDS = tl.constexpr(LAYER), tl.constexpr(SOURCES), tl.constexpr(OWN), tl.constexpr(IDS)


@dataclass(frozen=True)
class ExpertSpace:
    """Memory of a call, for any number of tokens up to what it was made for."""

    h: Tensor  # bfloat16 [pairs, padded width]
    partial: Tensor  # float32 [pairs, hidden]: of each pair, before its weight
    groups: Groups


def expert_space(tokens: int, top_k: int, experts: int, of: ExpertShape, device: torch.device) -> ExpertSpace:
    """Room for batches of up to `tokens`; ExpertSpace says how much."""
    pairs = tokens * top_k
    return ExpertSpace(
        torch.empty(pairs, of.down.padded_columns, dtype=torch.bfloat16, device=device),
        torch.empty(pairs, of.hidden, dtype=torch.float32, device=device),
        groups(pairs, experts, device),
    )


def experts(x: Tensor, at: Located, of: ExpertShape, space: ExpertSpace) -> None:
    """partial[t * k + j] of `space` = expert at.ids[t, j] of x[t], where its address is not 0.

    x bfloat16 [T, hidden]. How T * k pairs run depends on their number and the number of experts alone. Pairs of one
    expert have one address.
    """
    pairs = at.ids.numel()
    _check(x, at, of, space)
    if not pairs:
        return
    if pairs <= FEW_PAIRS:
        gate_up(x, at.up, of, space.h)
        down(space.h, at.down, of, space.partial)
        return
    by, total = space.groups, len(space.groups.counts)
    size = block_tokens(pairs, total)
    group(at.ids, total, size, by)
    gate_up_grouped(x, at.up, by, size, of, space.h)
    down_grouped(space.h, at.down, by, size, of, space.partial)


def _check(x: Tensor, at: Located, of: ExpertShape, space: ExpertSpace) -> None:
    pairs, tokens = at.ids.numel(), len(at.ids)
    for tensor, dtype in ((at.ids, torch.int32), (at.up, torch.int64), (at.down, torch.int64)):
        if tensor.dtype != dtype or tensor.shape != at.ids.shape or not tensor.is_contiguous():
            raise ValueError(f"of each pair {dtype} {tuple(at.ids.shape)}, not {tensor.dtype} {tuple(tensor.shape)}")
    if x.shape != (tokens, of.hidden) or x.stride(1) != 1 or x.dtype != torch.bfloat16:
        raise ValueError(f"x is bfloat16 [{tokens}, {of.hidden}], not {x.dtype} {tuple(x.shape)}")
    if pairs > len(space.h) or space.h.shape[1] < of.width or space.partial.shape[1:] != (of.hidden,):
        raise ValueError(f"the workspace has no room for {pairs} pairs of {of.width} and {of.hidden}")


@dataclass(frozen=True)
class Added:
    """What a MoE layer adds to its routed experts on the GPU. cpu float32 [T, hidden]: the sum of the CPU's experts;
    shared bfloat16 [T, hidden], times the sigmoid of shared_gate [T, 1] where there is one.
    """

    cpu: Tensor | None = None
    shared: Tensor | None = None
    shared_gate: Tensor | None = None


@dataclass(frozen=True)
class Watch:
    """Where `combine` notes rows that are not finite, and what it tells of them. ids int32 [T, k]: the chosen experts,
    -1 in rows of padding, which are never noted; x bfloat16 [T, hidden]: what the experts were given.
    """

    faults: LayerFaults
    ids: Tensor
    x: Tensor


@triton.jit
def _not_finite(values):
    """1 if one of them is, else 0."""
    return tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1), 0)


@triton.jit
def _note(
    records, layer, ids, x, partial, address, cpu, shared, token, column, inside,
    x_row, partial_row, cpu_row, shared_row, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of the programs that find a row not finite, the first one in its first layer writes the record. What it tells
    comes from this program's columns."""
    record = records + token * (_IDS + TOP_K)
    sources = 0
    own = 0
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        mine = tl.load(address + pair) != 0
        value = tl.load(partial + pair * partial_row + column, inside & mine, 0.0)
        own |= tl.where(mine, 1 << k, 0)
        sources |= _not_finite(value) << k
    if cpu is not None:
        sources |= _not_finite(tl.load(cpu + token * cpu_row + column, inside, 0.0)) * _CPU
    if shared is not None:
        value = tl.load(shared + token * shared_row + column, inside, 0.0).to(tl.float32)
        sources |= _not_finite(value) * _SHARED
    for first in range(0, hidden, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        value = tl.load(x + token * x_row + at, at < hidden, 0.0).to(tl.float32)
        sources |= _not_finite(value) * _INPUT
    if tl.atomic_cas(record + _LAYER, 0, layer) == 0:
        for k in tl.static_range(TOP_K):
            tl.store(record + _IDS + k, tl.load(ids + token * TOP_K + k))
        tl.store(record + _SOURCES, sources)
        tl.store(record + _OWN, own)


@triton.jit(do_not_specialize=["layer"])
def _combine(
    partial, weights, address, cpu, shared, gate, out, records, ids, x, layer,
    partial_row, cpu_row, shared_row, gate_row, out_row, x_row, hidden,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Float32, in the order of the choices, then the CPU's sum, then the shared expert."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        mine = tl.load(address + pair) != 0
        value = tl.load(partial + pair * partial_row + column, inside & mine, 0.0)
        total += tl.where(mine, tl.load(weights + pair), 0.0) * value
    if cpu is not None:
        total += tl.load(cpu + token * cpu_row + column, inside, 0.0)
    if shared is not None:
        value = tl.load(shared + token * shared_row + column, inside, 0.0).to(tl.float32)
        if gate is not None:
            value *= tl.sigmoid(tl.load(gate + token * gate_row).to(tl.float32))
        total += value
    tl.store(out + token * out_row + column, total.to(out.dtype.element_ty), inside)
    if records is not None:  # one condition after another: in a kernel, `and` computes both sides
        bad = _not_finite(total) != 0
        if bad:
            exists = tl.load(ids + token * TOP_K) >= 0  # a row of padding has no experts
            if exists:
                _note(
                    records, layer, ids, x, partial, address, cpu, shared, token, column, inside,
                    x_row, partial_row, cpu_row, shared_row, hidden, TOP_K, COLUMNS,
                )  # fmt: skip


def combine(
    partial: Tensor, weights: Tensor, down_address: Tensor, added: Added, out: Tensor, watch: Watch | None = None
) -> None:
    """out [T, hidden] bfloat16 = sum over k of weights * partial where the address is not 0, and what is `added`.

    partial float32 [>= T * k, hidden], weights float32 and down_address int64 [T, k]. Columns side by side. Rows that
    are not finite are noted where `watch` says, and stay as they are.
    """
    tokens, top_k = weights.shape
    hidden = out.shape[1]
    rows = (partial, *(t for t in (added.cpu, added.shared) if t is not None))
    if any(t.shape[1] != hidden or t.stride(1) != 1 for t in rows) or len(out) != tokens or out.stride(1) != 1:
        raise ValueError(f"all rows have {hidden} columns side by side, and out {tokens} rows")
    if added.shared_gate is not None and added.shared_gate.shape != (tokens, 1):
        raise ValueError(f"the shared expert's gate is [{tokens}, 1], not {tuple(added.shared_gate.shape)}")
    if watch is not None:
        _check_watch(watch, tokens, top_k, hidden)
    if not tokens:
        return
    records, ids, x, layer = (None, None, None, 0) if watch is None else (
        watch.faults.records, watch.ids, watch.x, watch.faults.layer + 1
    )  # fmt: skip
    strides = (0 if t is None else t.stride(0) for t in (partial, added.cpu, added.shared, added.shared_gate, out, x))
    _combine[(tokens, triton.cdiv(hidden, _COLUMNS))](
        partial, weights, down_address, added.cpu, added.shared, added.shared_gate, out, records, ids, x, layer,
        *strides, hidden, TOP_K=top_k, COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip


def _check_watch(watch: Watch, tokens: int, top_k: int, hidden: int) -> None:
    records, ids, x = watch.faults.records, watch.ids, watch.x
    whole = records.is_contiguous() and ids.is_contiguous() and x.stride(1) == 1
    if ids.shape != (tokens, top_k) or x.shape != (tokens, hidden) or not whole:
        raise ValueError(f"ids are [{tokens}, {top_k}] and x [{tokens}, {hidden}], not {ids.shape} and {x.shape}")
    if len(records) < tokens or records.shape[1] != IDS + top_k or top_k >= CPU.bit_length() - 1:
        raise ValueError(f"records are [{tokens} or more, {IDS + top_k}], not {tuple(records.shape)}")


def variants() -> Iterator[Variant]:
    types = {"partial": "*fp32", "weights": "*fp32", "address": "*i64", "out": "*bf16"}
    rows = ("partial_row", "cpu_row", "shared_row", "gate_row", "out_row", "x_row")
    types |= dict.fromkeys((*rows, "hidden", "layer"), "i32")
    extra = {"cpu": "*fp32", "shared": "*bf16", "gate": "*bf16", "records": "*i32", "ids": "*i32", "x": "*bf16"}
    watch = ("records", "ids", "x")
    added = ((), ("cpu",), ("shared", "gate"), ("cpu", "shared"), ("cpu", "shared", "gate"))
    for given in ((), *((*some, *watch) for some in added)):
        absent: dict[str, object] = {name: None for name in extra if name not in given}
        yield Variant(
            _combine,
            types | {name: extra[name] for name in given},
            absent | {"TOP_K": 8, "COLUMNS": _COLUMNS},
            warps=_WARPS,
            aligned=("partial", "out", *(n for n in ("cpu", "shared") if n in given), "partial_row", "out_row"),
        )
