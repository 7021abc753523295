"""The router on a GPU: which experts a token takes, and with what weights. Never: where experts are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.triton.variant import Variant

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
_WARPS = 1  # which needs no barrier
LOWEST = tl.constexpr(-(2**31))
SOFTMAX = 0  # kinds of score; another one is a branch of _scores


@triton.jit
def _scores(logits, exists, SCORE: tl.constexpr):
    """Of each expert, float32, larger is better; -inf where there is none. All NaN if a logit is no number."""
    tl.static_assert(SCORE == 0)
    logits = tl.where(exists, logits, float("-inf"))
    raised = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(raised, 0)
    return tl.where(exists, raised / total, total - total + float("-inf"))


@triton.jit
def best_experts(
    logits, exists,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCORE: tl.constexpr,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """logits float32 [BLOCK] of a token -> ids int32 and weights float32 [CHOSEN], of which the first TOP_K count."""
    expert = tl.arange(0, BLOCK)
    # Scores are not negative, or -inf: their bits are in the same order, and integers are reduced by one instruction.
    left = _scores(logits, exists, SCORE).to(tl.int32, bitcast=True)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros([CHOSEN], tl.int32)
    values = tl.zeros([CHOSEN], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, expert, BLOCK), 0)
        chosen = tl.where(place == k, tl.minimum(first, EXPERTS - 1), chosen)  # among NaN any, but one that exists
        values = tl.where(place == k, best.to(tl.float32, bitcast=True), values)
        left = tl.where(expert == first, LOWEST, left)
    if RENORMALISE:
        values = values / tl.sum(values, 0)
    return chosen, values


@triton.jit
def _route(
    logits, slots, ids, weights, logits_row,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCORE: tl.constexpr,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """A program is a token."""
    token = tl.program_id(0).to(tl.int64)
    real = tl.load(slots + token) >= 0
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    given = tl.load(logits + token * logits_row + expert, exists & real, 0.0).to(tl.float32)
    chosen, values = best_experts(given, exists, EXPERTS, TOP_K, RENORMALISE, SCORE, BLOCK, CHOSEN)
    place = tl.arange(0, CHOSEN)
    at, inside = token * TOP_K + place, place < TOP_K
    tl.store(ids + at, tl.where(real, chosen, -1), inside)
    tl.store(weights + at, tl.where(real, values, 0.0), inside)


def route(logits: Tensor, slots: Tensor, top_k: int, renormalise: bool, ids: Tensor, weights: Tensor) -> None:
    """softmax over logits bfloat16 or float32 [T, E], in float32; the `top_k` largest, best first, of equals the lower
    id; with `renormalise` their weights sum to 1. slots int64 [T]: a row of slot < 0 is padding.

    ids int32 [T, k], -1 for padding; weights float32 [T, k], 0 for padding.

    Raises ValueError for other types and sizes; E up to 1024, top_k up to 32 and E.
    """
    tokens, experts = logits.shape
    if not 0 < top_k <= min(experts, MOST_CHOSEN) or experts > MOST_EXPERTS:
        raise ValueError(
            f"{top_k} of {experts} experts: at most {MOST_CHOSEN} of {MOST_EXPERTS}, and not more than all"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        raise ValueError(
            f"logits are bfloat16 or float32, columns side by side, not {logits.dtype}, strides {logits.stride()}"
        )
    for out, dtype in ((ids, torch.int32), (weights, torch.float32)):
        if out.shape != (tokens, top_k) or out.dtype != dtype or not out.is_contiguous():
            raise ValueError(f"{dtype} [{tokens}, {top_k}] wanted, not {out.dtype} {tuple(out.shape)}")
    if slots.shape != (tokens,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots are int64 [{tokens}], not {slots.dtype} {tuple(slots.shape)}")
    if not tokens:
        return
    block = triton.next_power_of_2(experts)
    _route[(tokens,)](
        logits, slots, ids, weights, logits.stride(0), EXPERTS=experts, TOP_K=top_k, RENORMALISE=renormalise,
        SCORE=SOFTMAX, BLOCK=block, CHOSEN=triton.next_power_of_2(top_k), 
        num_warps=_WARPS,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    types = {"logits": "*bf16", "slots": "*i64", "ids": "*i32", "weights": "*fp32", "logits_row": "i32"}
    for experts, top_k, renormalise in ((128, 8, True), (60, 4, False), (512, 10, True), (1024, 32, False)):
        block = triton.next_power_of_2(experts)
        constants: dict[str, object] = {
            "EXPERTS": experts, "TOP_K": top_k, "RENORMALISE": renormalise, "SCORE": SOFTMAX, "BLOCK": block,
            "CHOSEN": triton.next_power_of_2(top_k),
        }  # fmt: skip
        yield Variant(_route, types, constants, warps=_WARPS, aligned=("logits",))
