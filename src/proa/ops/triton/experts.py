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

from proa.ops.residency import ExpertShape, Located
from proa.ops.triton import early
from proa.ops.triton.experts_few import Next, down, gate_up
from proa.ops.triton.experts_grouped import Groups, block_tokens, down_grouped, gate_up_grouped, group, groups
from proa.ops.triton.variant import Variant

FEW_PAIRS = 64  # up to here, hardly two pairs share an expert
_COLUMNS, _WARPS = 512, 4


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


def experts(x: Tensor, at: Located, of: ExpertShape, space: ExpertSpace, soon: Tensor | None = None) -> None:
    """partial[t * k + j] of `space` = expert at.ids[t, j] of x[t], where its address is not 0.

    x bfloat16 [T, hidden]. How T * k pairs run depends on their number and the number of experts alone. Pairs of one
    expert have one address. soon int64 [E]: down's addresses in VRAM (Residency.down), of which some is fetched early.
    """
    pairs = at.ids.numel()
    _check(x, at, of, space)
    if not pairs:
        return
    if pairs <= FEW_PAIRS:
        gate_up(x, at.up, of, space.h, None if soon is None else Next(at.ids, soon))
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


@triton.jit
def _combine(
    partial, weights, address, cpu, shared, gate, out, partial_row, cpu_row, shared_row, gate_row, out_row, hidden,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Float32, in the order of the choices, then the CPU's sum, then the shared expert."""
    early.begin(EARLY)
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


def combine(partial: Tensor, weights: Tensor, down_address: Tensor, added: Added, out: Tensor) -> None:
    """out [T, hidden] bfloat16 = sum over k of weights * partial where the address is not 0, and what is `added`.

    partial float32 [>= T * k, hidden], weights float32 and down_address int64 [T, k]. Columns side by side.
    """
    tokens, top_k = weights.shape
    hidden = out.shape[1]
    rows = (partial, *(t for t in (added.cpu, added.shared) if t is not None))
    if any(t.shape[1] != hidden or t.stride(1) != 1 for t in rows) or len(out) != tokens or out.stride(1) != 1:
        raise ValueError(f"all rows have {hidden} columns side by side, and out {tokens} rows")
    if added.shared_gate is not None and added.shared_gate.shape != (tokens, 1):
        raise ValueError(f"the shared expert's gate is [{tokens}, 1], not {tuple(added.shared_gate.shape)}")
    if not tokens:
        return
    strides = (0 if t is None else t.stride(0) for t in (partial, added.cpu, added.shared, added.shared_gate, out))
    _combine[(tokens, triton.cdiv(hidden, _COLUMNS))](
        partial, weights, down_address, added.cpu, added.shared, added.shared_gate, out, *strides, hidden,
        TOP_K=top_k, COLUMNS=_COLUMNS, **early.options(out.device), num_warps=_WARPS,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    return early.both(_plain())


def _plain() -> Iterator[Variant]:
    types = {"partial": "*fp32", "weights": "*fp32", "address": "*i64", "out": "*bf16"}
    types |= dict.fromkeys(("partial_row", "cpu_row", "shared_row", "gate_row", "out_row", "hidden"), "i32")
    extra = {"cpu": "*fp32", "shared": "*bf16", "gate": "*bf16"}
    for given in ((), ("cpu",), ("shared", "gate"), ("cpu", "shared", "gate")):
        absent: dict[str, object] = {name: None for name in extra if name not in given}
        yield Variant(
            _combine,
            types | {name: extra[name] for name in given},
            absent | {"TOP_K": 8, "COLUMNS": _COLUMNS},
            warps=_WARPS,
            aligned=("partial", "out", *(n for n in ("cpu", "shared") if n in given), "partial_row", "out_row"),
        )
