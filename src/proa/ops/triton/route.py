"""Routing on a GPU: logits to expert ids and weights. Never: where experts are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.models.spec import ExpertGroups, Router
from proa.ops.routing import NUMBERS, rule_arguments, rule_constants
from proa.ops.table import RouterRule
from proa.ops.triton.variant import Variant

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
_WARPS = 1  # so that reductions need no barrier
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def experts_of_lanes(EXPERTS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, PER_GROUP: tl.constexpr):
    """The expert of each lane, -1 for none, and a mask of lanes with an expert; each group has PER_GROUP of the
    LANES."""
    lane = tl.arange(0, LANES)
    of_group = lane % PER_GROUP
    expert = lane // PER_GROUP * (EXPERTS // GROUPS) + of_group
    exists = (of_group < EXPERTS // GROUPS) & (expert < EXPERTS)
    return tl.where(exists, expert, -1), exists


@triton.jit
def _scores(logits, exists, SCORE: tl.constexpr):
    """Score of each expert, float32; all NaN if any logit is NaN. SCORE: a value of ops/routing.py's SCORES."""
    if SCORE == 0:
        logits = tl.where(exists, logits, float("-inf"))
        raised = tl.exp(logits - tl.max(logits, 0))
        scores = raised / tl.sum(raised, 0)
    else:
        tl.static_assert(SCORE == 1)
        scores = 1 / (1 + tl.exp(-logits))
    total = tl.sum(tl.where(exists, scores, 0.0), 0)
    return scores + (total - total)


@triton.jit
def _ordered(x):
    """Map the bits of float32 to integers of the same order, and back: integer reductions are single instructions."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(x):
    return _ordered((x + 0.0).to(tl.int32, bitcast=True))  # -0.0 counts as 0.0


@triton.jit
def _in_best_groups(keys, exists, KEPT: tl.constexpr, BEST_OF: tl.constexpr, PER_GROUP: tl.constexpr):
    """Mask of lanes whose expert is in one of the KEPT best groups; among equal groups the first is kept."""
    GROUPS: tl.constexpr = keys.shape[0] // PER_GROUP
    by_group = tl.reshape(tl.where(exists, keys, LOWEST), [GROUPS, PER_GROUP])
    best = tl.max(by_group, 1)
    merit = best
    if BEST_OF == 2:
        place = tl.arange(0, PER_GROUP)[None, :]
        first = tl.min(tl.where(by_group == best[:, None], place, PER_GROUP), 1)
        second = tl.max(tl.where(place == first[:, None], LOWEST, by_group), 1)
        both = _ordered(best).to(tl.float32, bitcast=True) + _ordered(second).to(tl.float32, bitcast=True)
        merit = _keys(both)
    group = tl.arange(0, GROUPS)
    merit = tl.where(tl.max(tl.reshape(exists.to(tl.int32), [GROUPS, PER_GROUP]), 1) > 0, merit, LOWEST)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(KEPT):
        first = tl.min(tl.where((merit == tl.max(merit, 0)) & (kept == 0), group, GROUPS), 0)
        kept = tl.where(group == first, 1, kept)
        merit = tl.where(group == first, LOWEST, merit)
    lanes = tl.reshape(tl.broadcast_to(kept[:, None], [GROUPS, PER_GROUP]), [GROUPS * PER_GROUP])
    return exists & (lanes > 0)


@triton.jit
def best_experts(
    logits, correction, expert, exists, scale, epsilon, least,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCORE: tl.constexpr, KEPT: tl.constexpr, BEST_OF: tl.constexpr,
    PER_GROUP: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """logits float32 [LANES] of one token -> ids int32, weights float32 [CHOSEN], the first TOP_K of which are valid.

    KEPT 0: no groups. If any logit is NaN, all weights are NaN, and the ids are arbitrary but valid.
    """
    scores = _scores(logits, exists, SCORE)
    choice = scores
    if correction is not None:
        choice += tl.load(correction + expert, exists, 0.0)
        total = tl.sum(tl.where(exists, choice, 0.0), 0)
        scores += total - total
    left = _keys(choice)
    allowed = exists
    if KEPT:
        allowed = _in_best_groups(left, exists, KEPT, BEST_OF, PER_GROUP)
    left = tl.where(allowed, left, LOWEST)
    NO_EXPERT: tl.constexpr = 2**31 - 1
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros([CHOSEN], tl.int32)
    values = tl.zeros([CHOSEN], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, expert, NO_EXPERT), 0)
        if correction is None:
            value = _ordered(best).to(tl.float32, bitcast=True)
        else:
            value = tl.sum(tl.where(expert == first, scores, 0.0), 0)
        chosen = tl.where(place == k, first, chosen)
        values = tl.where(place == k, value, values)
        left = tl.where(expert == first, LOWEST, left)
    if RENORMALISE:
        total = tl.sum(values, 0) + epsilon
        values = values / tl.where(total < least, least, total)  # NaN propagates
    return chosen, values * scale


@triton.jit
def _route(
    logits, slots, correction, ids, weights, logits_row, scale, epsilon, least,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCORE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST_OF: tl.constexpr, LANES: tl.constexpr, PER_GROUP: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Route one token per program."""
    token = tl.program_id(0).to(tl.int64)
    real = tl.load(slots + token) >= 0
    expert, exists = experts_of_lanes(EXPERTS, GROUPS, LANES, PER_GROUP)
    given = tl.load(logits + token * logits_row + expert, exists & real, 0.0).to(tl.float32)
    chosen, values = best_experts(
        given, correction, expert, exists, scale, epsilon, least, TOP_K, RENORMALISE, SCORE, KEPT, BEST_OF, PER_GROUP,
        CHOSEN,
    )  # fmt: skip
    place = tl.arange(0, CHOSEN)
    at, inside = token * TOP_K + place, place < TOP_K
    tl.store(ids + at, tl.where(real, chosen, -1), inside)
    tl.store(weights + at, tl.where(real, values, 0.0), inside)


def check_rule(experts: int, rule: RouterRule) -> None:
    """Raise ValueError for rules that `best_experts` does not support."""
    if not 0 < rule.top_k <= min(experts, MOST_CHOSEN) or experts > MOST_EXPERTS:
        raise ValueError(
            f"top_k must be 1 to {MOST_CHOSEN} of at most {MOST_EXPERTS} experts, not {rule.top_k} of {experts}"
        )
    if rule.router.held:
        raise ValueError(f"the GPU's kernels do not route for one of several ranks: {rule.router.held}")
    if groups := rule.router.groups:
        size, rest = divmod(experts, groups.groups)
        fits = not rest and groups.best_of in (1, 2) and groups.best_of <= size and groups.kept <= groups.groups
        if not fits or groups.kept * size < rule.top_k:
            raise ValueError(f"{groups} do not fit {experts} experts with top_k {rule.top_k}")
    bias = rule.correction
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"the correction must be float32 [{experts}], not {bias.dtype} {tuple(bias.shape)}")


def route(logits: Tensor, slots: Tensor, rule: RouterRule, ids: Tensor, weights: Tensor) -> None:
    """Choose experts by the rule from logits bfloat16 or float32 [T, E]. slots int64 [T]: rows of slot < 0 are padding.

    ids int32 [T, k], -1 for padding; weights float32 [T, k], 0 for padding.

    Raises ValueError for other dtypes and sizes; E up to 1024, top_k up to 32 and E.
    """
    tokens, experts = logits.shape
    check_rule(experts, rule)
    if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be bfloat16 or float32 with contiguous rows, not {logits.dtype} of strides {logits.stride()}"
        )
    for out, dtype in ((ids, torch.int32), (weights, torch.float32)):
        if out.shape != (tokens, rule.top_k) or out.dtype != dtype or not out.is_contiguous():
            raise ValueError(f"outputs must be {dtype} [{tokens}, {rule.top_k}], not {out.dtype} {tuple(out.shape)}")
    if slots.shape != (tokens,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots must be int64 [{tokens}], not {slots.dtype} {tuple(slots.shape)}")
    if not tokens:
        return
    _route[(tokens,)](
        logits, slots, rule.correction, ids, weights, logits.stride(0), **rule_arguments(experts, rule),
        num_warps=_WARPS,
    )  # fmt: skip


SOME_RULES = (  # (experts, top_k, router) of published models, and the largest
    (128, 8, Router("softmax", True)),
    (60, 4, Router("softmax", False)),
    (512, 10, Router("softmax", True)),
    (1024, 32, Router("softmax", False)),
    (256, 8, Router("sigmoid", True, correction=True)),
    (256, 8, Router("sigmoid", True, correction=True, groups=ExpertGroups(8, 4, 2))),
    (160, 6, Router("softmax", False, groups=ExpertGroups(8, 3, 1))),
    (128, 4, Router("softmax", True, linear_bias=True)),
)


def variants() -> Iterator[Variant]:
    types = {"logits": "*fp32", "slots": "*i64", "ids": "*i32", "weights": "*fp32", "logits_row": "i32"}
    types |= dict.fromkeys(NUMBERS, "fp32")
    for experts, top_k, router in SOME_RULES:
        constants = rule_constants(experts, RouterRule(top_k, router))
        more = {"correction": "*fp32"} if router.correction else {}
        absent = {} if router.correction else {"correction": None}
        yield Variant(_route, types | more, constants | absent, warps=_WARPS, aligned=("logits",))
