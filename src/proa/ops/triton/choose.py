"""The fused kernel before the experts of a few rows: residual add, norm, router, top-k choice, location of the chosen
experts, and handing the CPU's pairs over. Never: many rows, which use separate ops (ops/choose.py).

A program has some rows of the router's weight and one row of x, whose norm every program recomputes. The last program
to arrive for a row sees all its logits and chooses; the last of those rings (see "several programs" in
hybrid/transport.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.models.spec import Router
from proa.ops.residency import Located, Residency
from proa.ops.routing import NUMBERS, rule_arguments, rule_constants
from proa.ops.table import Norm, RouterRule
from proa.ops.triton.bell import DECODE_JOB, JOB_NUMBER, PAIRS, arrive
from proa.ops.triton.locate import places
from proa.ops.triton.route import (
    MOST_EXPERTS,
    SOME_RULES,
    best_experts,
    check_rule,
    experts_of_lanes,
)
from proa.ops.triton.variant import Variant

MOST_ROWS, MOST_COLUMNS = 4, 8192


@dataclass(frozen=True)
class ChoiceSpace:
    """Memory that the programs of a call exchange; calls that share it must be ordered on one stream."""

    logits: Tensor  # float32 [MOST_ROWS, MOST_EXPERTS]
    arrived: Tensor  # int32 [MOST_ROWS], 0 between calls


def warps_for(columns: int) -> int:
    """One warp, whose reductions need no barrier, unless it would spill a row: with 8192 columns it needs 3.5 KB of
    stack for each thread, and the driver takes that for all threads that a GPU can hold, 690 MiB of an H200's VRAM."""
    return 1 if columns <= 4096 else 4


def choice_space(device: torch.device) -> ChoiceSpace:
    return ChoiceSpace(
        torch.empty(MOST_ROWS, MOST_EXPERTS, device=device),
        torch.zeros(MOST_ROWS, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["counts"])  # both vary by layer
def _choose(
    x, y, weight, router, router_bias, correction, slots, logits, arrived, total, normed, ids, weights,
    up_table, down_table, cpu_table, counts, up_place, down_place, share, up, down, cpu,
    header, to_ids, to_weights, to_x, rung, state, layer,
    x_row, y_row, router_row, logits_row, width, eps, offset, scale, epsilon, least,
    COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    SCORE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST_OF: tl.constexpr, LANES: tl.constexpr,
    PER_GROUP: tl.constexpr, CHOSEN: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """ALONE: there is one row."""
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    mine = tl.load(router + expert.to(tl.int64) * router_row + column, inside, 0.0)
    value = tl.load(x + row * x_row + column, inside, 0.0).to(tl.float32)
    value += tl.load(y + row * y_row + column, inside, 0.0).to(tl.float32)
    value = value.to(tl.bfloat16).to(tl.float32)  # normalise the rounded residual stream
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32) + offset
    norm = (value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * factor).to(tl.bfloat16)
    if expert == 0:
        tl.store(total + row * width + column, value.to(tl.bfloat16), inside)
        tl.store(normed + row * width + column, norm, inside)
    logit = tl.sum(norm.to(tl.float32) * mine.to(tl.float32), 0)
    if router_bias is not None:
        logit += tl.load(router_bias + expert).to(tl.float32)
    tl.store(logits + row * logits_row + expert, logit)
    tl.debug_barrier()  # the arrival below publishes the stores of all threads
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == EXPERTS - 1:
        tl.store(arrived + row, 0)
        real = tl.load(slots + row) >= 0
        every, exists = experts_of_lanes(EXPERTS, GROUPS, LANES, PER_GROUP)
        given = tl.load(logits + row * logits_row + every, exists, 0.0, cache_modifier=".cg")
        chosen, values = best_experts(
            tl.where(real, given, 0.0), correction, every, exists, scale, epsilon, least, TOP_K, RENORMALISE, SCORE,
            KEPT, BEST_OF, PER_GROUP, CHOSEN,
        )  # fmt: skip
        place = tl.arange(0, CHOSEN)
        at, counted = row * TOP_K + place, place < TOP_K
        values = tl.where(real, values, 0.0)
        tl.store(ids + at, tl.where(real, chosen, -1), counted)
        tl.store(weights + at, values, counted)
        if up_table is not None:
            gate_up, low, number = places(
                chosen, counted & real, up_table, down_table, cpu_table, counts, up_place, down_place, share
            )
            tl.store(up + at, gate_up, counted)
            tl.store(down + at, low, counted)
            tl.store(cpu + at, number, counted)
            if rung is not None:
                theirs = counted & (number >= 0)
                pairs = tl.sum(theirs.to(tl.int32), 0)
                pairs = tl.where((layer >= DECODE_JOB) & real, tl.maximum(pairs, 1), pairs)
                tl.store(to_ids + at, tl.where(theirs, number, -1), counted)
                tl.store(to_weights + at, values, counted)
                tl.store(state + PAIRS + row, pairs)
                tl.store(to_x + row * width + column, norm, inside & (pairs > 0))
                job = tl.load(state + JOB_NUMBER) + 1
                rows = tl.num_programs(1)
                arrive(header, rung, state, layer, rows, job, tl.minimum(pairs, 1), rows, ALONE)


@dataclass(frozen=True)
class RouterRows:
    """The router's weight, bfloat16 [E, N], and bias, bfloat16 [E] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class ChooseOutputs:
    """Outputs of `choose` for R rows. total, normed bfloat16 [R, N]; at.ids int32, weights float32 [R, k]. If the layer
    has a doorbell, at.handed_over is true.
    """

    total: Tensor
    normed: Tensor
    weights: Tensor
    at: Located


def choose(
    x: Tensor, y: Tensor, norm: Norm, router: RouterRows, slots: Tensor, rule: RouterRule, residency: Residency,
    space: ChoiceSpace, out: ChooseOutputs,
) -> None:  # fmt: skip
    """total = x + y; normed = rms_norm(total); route from normed @ router^T + bias in float32; look the chosen experts
    up in `residency`; if that has a doorbell, do what push of bell.py does.

    x, y bfloat16 [R, N], R up to MOST_ROWS, N up to MOST_COLUMNS; slots int64 [R]. Raises ValueError for other shapes
    and dtypes.
    """
    _check(x, y, norm, router, slots, rule, out)
    rows, width = x.shape
    experts = len(router.weight)
    here = residency.in_place if rows == 1 else None
    in_place = (here.up, here.down, here.share) if here else (None, None, None)
    bell: tuple[Tensor | int | None, ...] = (None,) * 6 + (0,)
    if (to := residency.bell) is not None:
        block = to.block
        bell = (block.header, block.ids, block.weights, block.x, block.rung, to.state, to.layer)
    if rows:
        columns = triton.next_power_of_2(width)
        _choose[(experts, rows)](
            x, y, norm.weight, router.weight, router.bias, rule.correction, slots, space.logits, space.arrived,
            out.total, out.normed, out.at.ids, out.weights, residency.up, residency.down, residency.cpu,
            residency.counts, *in_place, out.at.up, out.at.down, out.at.cpu, *bell,
            x.stride(0), y.stride(0), router.weight.stride(0), space.logits.stride(0), width, norm.eps, norm.offset,
            **rule_arguments(experts, rule), COLUMNS=columns, ALONE=rows == 1, num_warps=warps_for(columns),
        )  # fmt: skip


def check_asked(x: Tensor, norm: Norm, router: RouterRows, rule: RouterRule) -> None:
    """Raise ValueError for rows or a router that this kernel and look_ahead do not support."""
    (rows, width), experts = x.shape, len(router.weight)
    if rows > MOST_ROWS or width > MOST_COLUMNS:
        raise ValueError(f"x must be [{rows}, {width}], at most [{MOST_ROWS}, {MOST_COLUMNS}]")
    check_rule(experts, rule)
    shapes = {
        "x": (x, (rows, width)), "the router": (router.weight, (experts, width)), "the norm": (norm.weight, (width,)),
        "the router's bias": (router.bias, (experts,)),
    }  # fmt: skip
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and (tensor.shape != shape or tensor.dtype != torch.bfloat16 or tensor.stride(-1) != 1):
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{name} must be bfloat16 {shape} with contiguous rows, not {got}")


def _check(
    x: Tensor, y: Tensor, norm: Norm, router: RouterRows, slots: Tensor, rule: RouterRule, out: ChooseOutputs
) -> None:  # fmt: skip
    check_asked(x, norm, router, rule)
    rows = len(x)
    if y.shape != x.shape or y.dtype != torch.bfloat16 or y.stride(1) != 1:
        raise ValueError(f"y must be bfloat16 {tuple(x.shape)} with contiguous rows, not {y.dtype} {tuple(y.shape)}")
    if slots.shape != (rows,) or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [{rows}], not {slots.dtype} {tuple(slots.shape)}")
    at, pairs = out.at, (rows, rule.top_k)
    for tensor, dtype in (
        (at.ids, torch.int32), (at.up, torch.int64), (at.down, torch.int64), (at.cpu, torch.int32),
        (out.weights, torch.float32),
    ):  # fmt: skip
        if tensor.shape != pairs or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"outputs per pair must be {dtype} {pairs}, not {tensor.dtype} {tuple(tensor.shape)}")
    for tensor in (out.total, out.normed):
        if tensor.shape != x.shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"total and normed must be bfloat16 {tuple(x.shape)}, not {got}")


def some_columns(experts: int, router: Router) -> int:
    """The padded row length of a published model with such a router; for the largest router MOST_COLUMNS."""
    return 8192 if experts == 1024 or router.groups is not None else 4096 if router.linear_bias else 2048


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("x", "y", "weight", "router", "total", "normed"), "*bf16")
    types |= dict.fromkeys(("slots", "up_table", "down_table", "up", "down"), "*i64")
    types |= dict.fromkeys(("logits", "weights"), "*fp32") | dict.fromkeys(("eps", "offset", *NUMBERS), "fp32")
    types |= dict.fromkeys(("arrived", "ids", "cpu_table", "cpu"), "*i32")
    types |= dict.fromkeys(("x_row", "y_row", "router_row", "logits_row", "width"), "i32")
    in_place = {"up_place": "*i64", "down_place": "*i64", "share": "*i32"}
    bell = dict.fromkeys(("header", "to_ids", "rung", "state"), "*i32") | {"to_weights": "*fp32", "to_x": "*bf16"}
    types |= {"layer": "i32"}
    optional = ("correction", "router_bias", "counts", *in_place, *bell)
    aligned = ("x", "y", "weight", "router", "logits", "total", "normed", "x_row", "y_row", "router_row", "width")
    for experts, top_k, router in SOME_RULES:
        more = {"correction": "*fp32"} if router.correction else {}
        more |= {"router_bias": "*bf16"} if router.linear_bias else {}
        more |= {"counts": "*i32"} if experts != 128 or router.linear_bias else {}
        more |= in_place if experts in (256, 512) or router.linear_bias else {}
        more |= bell if experts in (128, 256) else {}
        absent = dict.fromkeys(name for name in optional if name not in more)
        constants = rule_constants(experts, RouterRule(top_k, router)) | absent
        columns = some_columns(experts, router)
        constants |= {"COLUMNS": columns, "ALONE": experts == 128}
        yield Variant(_choose, types | more, constants, warps=warps_for(columns), aligned=aligned)
