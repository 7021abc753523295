"""The weighted sum of a MoE layer's expert outputs, fused with the residual add and the next norm. Never: computing
experts; the sum of the CPU's experts is an input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.added import Added
from proa.ops.bell_block import Bell
from proa.ops.faults import CPU, IDS, INPUT, LAYER, OWN, SHARED, SOURCES, LayerFaults
from proa.ops.table import Norm
from proa.ops.triton.bell import MOST_POLLED_VALUES, PAIRS, await_answer
from proa.ops.triton.norm import add_rms_norm
from proa.ops.triton.variant import Variant

_COLUMNS, _WARPS = 512, 4
MOST_COLUMNS = 8192  # for the fused norm: a program has a whole row
_CPU, _SHARED, _INPUT = tl.constexpr(CPU), tl.constexpr(SHARED), tl.constexpr(INPUT)
_LAYER, _SOURCES, _OWN, _IDS = tl.constexpr(LAYER), tl.constexpr(SOURCES), tl.constexpr(OWN), tl.constexpr(IDS)


@dataclass(frozen=True)
class Watch:
    """The fault records that `combine` writes for non-finite rows, and the data for them. ids int32 [T, k]: chosen
    experts, -1 in padding rows, which are never recorded; x bfloat16 [T, hidden]: the experts' input.
    """

    faults: LayerFaults
    ids: Tensor
    x: Tensor


@triton.jit
def _not_finite(values):
    """1 if any value is NaN or infinite, else 0."""
    return tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1), 0)


@triton.jit
def _of_cpu(at, state, token, inside):
    """Load the sum of the CPU's experts. With `state`, it is in the doorbell's block, which the CPU has written since
    the last answer, so a cached copy would be stale."""
    if state is None:
        value = tl.load(at, inside, 0.0)
    else:
        value = tl.load(at, inside & (tl.load(state + PAIRS + token) > 0), 0.0, volatile=True)
    return value


@triton.jit
def _note(
    records, layer, ids, x, partial, address, cpu, shared, state, token, column, inside,
    x_row, partial_row, cpu_row, shared_row, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Record a non-finite row: the first program that finds it, in the first layer that has it, writes the record, from
    the columns of that program."""
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
        sources |= _not_finite(_of_cpu(cpu + token * cpu_row + column, state, token, inside)) * _CPU
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
    partial, weights, address, cpu, answer, state, shared, gate, residual, norm, out, normed, records, ids, x, layer,
    partial_row, cpu_row, shared_row, gate_row, residual_row, out_row, normed_row, x_row, hidden, eps, offset, factor,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum in float32, in the order of the choices, then the CPU's sum, then the shared expert; then multiply by
    `factor` and add the residual."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    if residual is not None:  # prefetch it, and the norm's weights
        before = tl.load(residual + token * residual_row + column, inside, 0.0).to(tl.float32)
    if norm is not None:
        scale = tl.load(norm + column, inside, 0.0).to(tl.float32) + offset
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        value = tl.load(partial + pair * partial_row + column, inside, 0.0)  # arbitrary where no expert wrote
        total += tl.where(tl.load(address + pair) != 0, tl.load(weights + pair) * value, 0.0)
    if cpu is not None:
        if state is not None:
            await_answer(answer, state)
        total += _of_cpu(cpu + token * cpu_row + column, state, token, inside)
    if shared is not None:
        value = tl.load(shared + token * shared_row + column, inside, 0.0).to(tl.float32)
        if gate is not None:
            value *= tl.sigmoid(tl.load(gate + token * gate_row).to(tl.float32))
        total += value
    total *= factor
    after = total if residual is None else total + before
    kept = after.to(out.dtype.element_ty)
    tl.store(out + token * out_row + column, kept, inside)
    if norm is not None:  # normalise the rounded residual stream
        kept = kept.to(tl.float32)
        kept *= tl.rsqrt(tl.sum(kept * kept, 0) / hidden + eps) * scale
        tl.store(normed + token * normed_row + column, kept.to(tl.bfloat16), inside)
    if records is not None:  # nested ifs: in a kernel, `and` evaluates both sides
        bad = _not_finite(total) != 0
        if bad:
            exists = tl.load(ids + token * TOP_K) >= 0  # a padding row has no experts
            if exists:
                _note(
                    records, layer, ids, x, partial, address, cpu, shared, state, token, column, inside,
                    x_row, partial_row, cpu_row, shared_row, hidden, TOP_K, COLUMNS,
                )  # fmt: skip


@dataclass(frozen=True)
class Into:
    """Outputs of `combine`. out [T, hidden]: the sum, or residual + sum; out may be residual. It is bfloat16, or
    float32 for a part of a sum; then it may be the tensor of the CPU's sum.

    normed bfloat16 [T, hidden]: the norm of out; requires hidden up to MOST_COLUMNS.
    """

    out: Tensor
    residual: Tensor | None = None
    norm: Norm | None = None
    normed: Tensor | None = None


def combine(
    partial: Tensor, weights: Tensor, down_address: Tensor, added: Added, into: Into, watch: Watch | None = None,
    factor: float = 1.0,
) -> None:  # fmt: skip
    """Sum weights * partial over the k pairs of each token whose address is not 0, plus the terms in `added`, and
    multiply by `factor`. If the terms include a doorbell, wait for its answer.

    partial float32 [>= T * k, hidden], weights float32 and down_address int64 [T, k]; contiguous columns. Non-finite
    rows of the sum are recorded in `watch`, and not changed.
    """
    tokens, top_k = weights.shape
    hidden = into.out.shape[1]
    _check(partial, added, into, tokens, hidden)
    if watch is not None:
        _check_watch(watch, tokens, top_k, hidden)
    if not tokens:
        return
    records, ids, x, layer = (None, None, None, 0) if watch is None else (
        watch.faults.notes.records, watch.ids, watch.x, watch.faults.layer + 1
    )  # fmt: skip
    cpu, *bell = _of_bell(added.cpu)
    tensors = (added.shared, added.shared_gate, into.residual)
    strides = (0 if t is None else t.stride(0) for t in (partial, cpu, *tensors, into.out, into.normed, x))
    weight, eps, offset = (None, 0.0, 0.0) if (n := into.norm) is None else (n.weight, n.eps, n.offset)
    columns, warps = _shape(hidden, whole=weight is not None)
    _combine[(tokens, triton.cdiv(hidden, columns))](
        partial, weights, down_address, cpu, *bell, *tensors, weight, into.out, into.normed, records, ids, x, layer,
        *strides, hidden, eps, offset, factor, TOP_K=top_k, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip


@dataclass(frozen=True)
class ExpertSum:
    """Implements Unsummed of ops/table.py: the arguments of `combine`, which must stay valid until it is added."""

    partial: Tensor
    weights: Tensor
    address: Tensor
    added: Added
    watch: Watch | None = None
    factor: float = 1.0

    def scaled(self, factor: float) -> ExpertSum:
        return replace(self, factor=self.factor * factor)

    def total(self) -> Tensor:
        out = torch.empty(len(self.weights), self.partial.shape[1], dtype=torch.bfloat16, device=self.weights.device)
        self._combine(Into(out))
        return out

    def add(self, x: Tensor) -> Tensor:
        self._combine(Into(x, x))
        return x

    def add_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[1] <= MOST_COLUMNS:
            self._combine(Into(x, x, norm, normed))
        else:
            add_rms_norm(x, self.total(), norm, normed)
        return x, normed

    def _combine(self, into: Into) -> None:
        combine(self.partial, self.weights, self.address, self.added, into, self.watch, self.factor)


def _shape(hidden: int, whole: bool) -> tuple[int, int]:
    """Columns and warps of a program; whole: it needs the whole row, for a norm."""
    if not whole:
        return _COLUMNS, _WARPS
    columns = triton.next_power_of_2(hidden)
    return columns, min(16, max(1, columns // 256))


def can_wait(tokens: int, hidden: int) -> bool:
    """True if `combine` may wait for a doorbell with this many rows: each of its programs polls for the answer."""
    return tokens * hidden <= MOST_POLLED_VALUES


def _of_bell(cpu: Tensor | Bell | None) -> tuple[Tensor | None, ...]:
    """The kernel's arguments for the CPU's sum: its address, the doorbell's answer word and state."""
    return (cpu.block.y, cpu.block.answer, cpu.state) if isinstance(cpu, Bell) else (cpu, None, None)


def _check(partial: Tensor, added: Added, into: Into, tokens: int, hidden: int) -> None:
    if isinstance(added.cpu, Bell) and (not can_wait(tokens, hidden) or tokens > len(added.cpu.block.y)):
        raise ValueError(f"combine cannot wait for the doorbell with {tokens} rows of {hidden}; use pull instead")
    given = (partial, _of_bell(added.cpu)[0], added.shared, into.out, into.residual, into.normed)
    if any(t is not None and (t.shape[1] != hidden or t.stride(1) != 1) for t in given) or len(into.out) != tokens:
        raise ValueError(f"all rows must have {hidden} contiguous columns, and out {tokens} rows")
    if added.shared_gate is not None and added.shared_gate.shape != (tokens, 1):
        raise ValueError(f"the shared expert's gate must be [{tokens}, 1], not {tuple(added.shared_gate.shape)}")
    if (into.norm is None) != (into.normed is None) or (into.norm is not None and hidden > MOST_COLUMNS):
        raise ValueError(f"norm and normed go together, for up to {MOST_COLUMNS} columns; hidden is {hidden}")


def _check_watch(watch: Watch, tokens: int, top_k: int, hidden: int) -> None:
    records, ids, x = watch.faults.notes.records, watch.ids, watch.x
    whole = records.is_contiguous() and ids.is_contiguous() and x.stride(1) == 1
    if ids.shape != (tokens, top_k) or x.shape != (tokens, hidden) or not whole:
        raise ValueError(f"ids must be [{tokens}, {top_k}] and x [{tokens}, {hidden}], not {ids.shape} and {x.shape}")
    if len(records) < tokens or records.shape[1] != IDS + top_k or top_k >= CPU.bit_length() - 1:
        raise ValueError(f"records must be [{tokens} or more, {IDS + top_k}], not {tuple(records.shape)}")


def variants() -> Iterator[Variant]:
    types = {"partial": "*fp32", "weights": "*fp32", "address": "*i64", "out": "*bf16"}
    rows = ("partial_row", "cpu_row", "shared_row", "gate_row", "residual_row", "out_row", "normed_row", "x_row")
    types |= dict.fromkeys((*rows, "hidden", "layer"), "i32") | dict.fromkeys(("eps", "offset", "factor"), "fp32")
    extra = {"cpu": "*fp32", "shared": "*bf16", "gate": "*bf16", "records": "*i32", "ids": "*i32", "x": "*bf16"}
    extra |= dict.fromkeys(("residual", "norm", "normed"), "*bf16") | {"answer": "*i64", "state": "*i32"}
    watch, norm = ("records", "ids", "x"), ("residual", "norm", "normed")
    for given, hidden in (
        ((), 512),
        (("cpu", *watch), 512),
        (("residual", "shared", "gate", *watch), 512),
        (("cpu", "shared", "gate", *watch), 512),
        ((*norm, *watch), 2048),
        (("cpu", "answer", "state", *norm, *watch), 2048),
        (("cpu", "shared", *norm, *watch), 4096),
        (("cpu", "shared", "gate", *norm, *watch), 7168),
    ):
        absent: dict[str, object] = {name: None for name in extra if name not in given}
        columns, warps = _shape(hidden, "norm" in given)
        yield Variant(
            _combine,
            types | {name: extra[name] for name in given},
            absent | {"TOP_K": 8, "COLUMNS": columns},
            warps=warps,
            aligned=("partial", "out", *(n for n in ("cpu", "shared", *norm) if n in given), "partial_row", "out_row"),
        )
