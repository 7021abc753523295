"""Predicts which of the CPU's experts the next MoE layer will choose, by applying its router to the residual stream
before this layer's experts are added. Belongs here: the kernel that predicts and notifies the CPU. Never: what the CPU
does with the prediction.

A program has one of the next layer's experts and one row, as in choose.py; the last one to arrive for a row chooses,
and the last of those publishes the prediction (see "several programs" in hybrid/transport.py; it is written like a
job).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.doorbell import FORESEEN_ROWS
from proa.ops.bell_block import BellBlock
from proa.ops.routing import NUMBERS, rule_arguments, rule_constants
from proa.ops.table import Norm, RouterRule
from proa.ops.triton.bell import ring
from proa.ops.triton.choose import RouterRows, check_asked, some_columns, warps_for
from proa.ops.triton.route import MOST_EXPERTS, SOME_RULES, best_experts, experts_of_lanes
from proa.ops.triton.variant import Variant

MOST_ROWS = FORESEEN_ROWS
# Words of `state`: number of the last prediction, rows that have chosen, then per row the experts that have arrived.
_NUMBER, _ROWS, _ARRIVED = (tl.constexpr(i) for i in range(3))
_LAYER, _COUNT = tl.constexpr(1), tl.constexpr(2)  # offsets of the layer and the count behind the prediction's number


@dataclass(frozen=True)
class LookSpace:
    """Memory that the programs of a call exchange; calls that share it must be ordered on one stream."""

    logits: Tensor  # float32 [MOST_ROWS, MOST_EXPERTS]
    state: Tensor  # int32 [2 + MOST_ROWS], zeros at first


def look_space(device: torch.device) -> LookSpace:
    return LookSpace(
        torch.empty(MOST_ROWS, MOST_EXPERTS, device=device),
        torch.zeros(2 + MOST_ROWS, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["layer"])
def _look_ahead(
    x, weight, router, router_bias, correction, slots, logits, state, cpu_table, foreseen, to_ids, layer,
    x_row, router_row, logits_row, width, eps, offset, scale, epsilon, least,
    COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    SCORE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST_OF: tl.constexpr, LANES: tl.constexpr,
    PER_GROUP: tl.constexpr, CHOSEN: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """ALONE: there is one row."""
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    mine = tl.load(router + expert.to(tl.int64) * router_row + column, inside, 0.0).to(tl.float32)
    value = tl.load(x + row * x_row + column, inside, 0.0).to(tl.float32)
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32) + offset
    norm = (value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * factor).to(tl.bfloat16)
    logit = tl.sum(norm.to(tl.float32) * mine, 0)
    if router_bias is not None:
        logit += tl.load(router_bias + expert).to(tl.float32)
    tl.store(logits + row * logits_row + expert, logit)
    tl.debug_barrier()  # the arrival below publishes the stores of all threads
    if tl.atomic_add(state + _ARRIVED + row, 1, sem="acq_rel") == EXPERTS - 1:
        tl.store(state + _ARRIVED + row, 0)
        real = tl.load(slots + row) >= 0
        every, exists = experts_of_lanes(EXPERTS, GROUPS, LANES, PER_GROUP)
        given = tl.load(logits + row * logits_row + every, exists, 0.0, cache_modifier=".cg")
        chosen, _ = best_experts(
            tl.where(real, given, 0.0), correction, every, exists, scale, epsilon, least, TOP_K, RENORMALISE, SCORE,
            KEPT, BEST_OF, PER_GROUP, CHOSEN,
        )  # fmt: skip
        place = tl.arange(0, CHOSEN)
        counted = place < TOP_K
        tl.store(to_ids + row * TOP_K + place, tl.load(cpu_table + chosen, counted & real, -1), counted)
        tl.debug_barrier()
        rows = tl.num_programs(1)
        if ALONE or tl.atomic_add(state + _ROWS, 1, sem="acq_rel", scope="sys") == rows - 1:
            tl.debug_barrier()  # all threads have read the counter
            number = tl.load(state + _NUMBER) + 1
            tl.debug_barrier()  # all threads have read it
            tl.store(state + _ROWS, 0)
            tl.store(state + _NUMBER, number)
            tl.store(foreseen + _LAYER, layer)
            tl.store(foreseen + _COUNT, rows)
            ring(foreseen, number)


def look_ahead(
    x: Tensor, norm: Norm, router: RouterRows, rule: RouterRule, slots: Tensor, cpu: Tensor, layer: int,
    block: BellBlock, space: LookSpace,
) -> None:  # fmt: skip
    """Publish to the CPU which of its experts this router chooses from rms_norm(x), each row's likeliest first. layer:
    the CPU's number of the next MoE layer.

    x bfloat16 [R, N], R up to MOST_ROWS, N up to MOST_COLUMNS of choose.py; slots int64 [R], rows of slot -1 are
    padding; cpu int32 [E]: the experts' CPU numbers, -1: not on the CPU. Raises ValueError for other shapes and dtypes.
    """
    rows, width = x.shape
    experts = len(router.weight)
    _check(x, norm, router, slots, cpu, rule)
    if rows:
        columns = triton.next_power_of_2(width)
        _look_ahead[(experts, rows)](
            x, norm.weight, router.weight, router.bias, rule.correction, slots, space.logits, space.state, cpu,
            block.foreseen, block.foreseen_ids, layer,
            x.stride(0), router.weight.stride(0), space.logits.stride(0), width,
            norm.eps, norm.offset,
            **rule_arguments(experts, rule), COLUMNS=columns, ALONE=rows == 1, num_warps=warps_for(columns),
        )  # fmt: skip


def _check(x: Tensor, norm: Norm, router: RouterRows, slots: Tensor, cpu: Tensor, rule: RouterRule) -> None:
    check_asked(x, norm, router, rule)
    rows, experts = len(x), len(router.weight)
    for name, numbers, count, dtype in (("slots", slots, rows, torch.int64), ("cpu", cpu, experts, torch.int32)):
        if numbers.shape != (count,) or numbers.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} [{count}], not {numbers.dtype} {tuple(numbers.shape)}")


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("x", "weight", "router"), "*bf16") | {"slots": "*i64", "logits": "*fp32", "layer": "i32"}
    types |= dict.fromkeys(("state", "cpu_table", "foreseen", "to_ids"), "*i32")
    types |= dict.fromkeys(("x_row", "router_row", "logits_row", "width"), "i32")
    types |= dict.fromkeys(("eps", "offset", *NUMBERS), "fp32")
    aligned = ("x", "weight", "router", "logits", "x_row", "router_row", "width")
    for experts, top_k, router in SOME_RULES:
        more = {"correction": "*fp32"} if router.correction else {}
        more |= {"router_bias": "*bf16"} if router.linear_bias else {}
        absent = dict.fromkeys(name for name in ("correction", "router_bias") if name not in more)
        constants = rule_constants(experts, RouterRule(top_k, router)) | absent
        columns = some_columns(experts, router)
        constants |= {"COLUMNS": columns, "ALONE": experts == 128}
        yield Variant(_look_ahead, types | more, constants, warps=warps_for(columns), aligned=aligned)
