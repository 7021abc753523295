"""The router on a GPU: which experts a token takes, with what weights, and where the GPU can read them.

Belongs here: scores to ids, weights and addresses. Never: who decides what is resident; the tables say it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.triton.variant import Variant

MOST_EXPERTS, MOST_CHOSEN = 1024, 32
SOFTMAX = 0  # kinds of score; another one is a branch of _scores


@dataclass(frozen=True)
class Addresses:
    """Where the GPU reads experts, int64, 0 if it cannot: of each expert of a layer [E] or each token's choice [T, k].

    up: gate and up, panel by panel; down. An expert has both or none.
    """

    up: Tensor
    down: Tensor

    def check(self, shape: tuple[int, ...]) -> None:
        _check("addresses", self.up, torch.int64, shape)
        _check("addresses", self.down, torch.int64, shape)


@dataclass(frozen=True)
class Routing:
    """Of each token [T, k]: ids int32 (-1 in padding), weights float32, and addresses."""

    ids: Tensor
    weights: Tensor
    addresses: Addresses

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless all are of this shape."""
        _check("ids", self.ids, torch.int32, shape)
        _check("weights", self.weights, torch.float32, shape)
        self.addresses.check(shape)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name}: {dtype} {shape} side by side wanted, not {tensor.dtype} {tuple(tensor.shape)}")


@triton.jit
def _scores(logits, exists, SCORE: tl.constexpr):
    """Of each expert, float32, larger is better; -inf where there is none. All NaN if a logit is no number."""
    tl.static_assert(SCORE == 0)
    logits = tl.where(exists, logits, float("-inf"))
    raised = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(raised, 0)
    return tl.where(exists, raised / total, total - total + float("-inf"))


@triton.jit
def _route(
    logits, slots, up_table, down_table, ids, weights, up_address, down_address, logits_row,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCORE: tl.constexpr,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """A program is a token."""
    token = tl.program_id(0).to(tl.int64)
    real = tl.load(slots + token) >= 0
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    left = _scores(tl.load(logits + token * logits_row + expert, exists & real, 0.0), exists, SCORE)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros([CHOSEN], tl.int32)
    values = tl.zeros([CHOSEN], tl.float32)
    for k in tl.static_range(TOP_K):
        best, first = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        first = tl.minimum(first, EXPERTS - 1)  # among NaN any may come out; none outside the tables
        chosen = tl.where(place == k, first, chosen)
        values = tl.where(place == k, best, values)
        left = tl.where(expert == first, float("-inf"), left)
    if RENORMALISE:
        values = values / tl.sum(values, 0)
    at, inside = token * TOP_K + place, place < TOP_K
    tl.store(ids + at, tl.where(real, chosen, -1), inside)
    tl.store(weights + at, tl.where(real, values, 0.0), inside)
    tl.store(up_address + at, tl.load(up_table + chosen, inside & real, 0), inside)
    tl.store(down_address + at, tl.load(down_table + chosen, inside & real, 0), inside)


def route(logits: Tensor, slots: Tensor, top_k: int, renormalise: bool, tables: Addresses, out: Routing) -> None:
    """softmax over logits float32 [T, E]; the `top_k` largest, best first, of equals the lower id; with `renormalise`
    their weights sum to 1. slots int64 [T]: a row of slot < 0 is padding, with ids -1, weights 0 and addresses 0.

    Raises ValueError for other types and sizes; E up to 1024, top_k up to 32 and E.
    """
    tokens, experts = logits.shape
    if not 0 < top_k <= min(experts, MOST_CHOSEN) or experts > MOST_EXPERTS:
        raise ValueError(
            f"{top_k} of {experts} experts: at most {MOST_CHOSEN} of {MOST_EXPERTS}, and not more than all"
        )
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are float32 with columns side by side, not {logits.dtype}, strides {logits.stride()}")
    tables.check((experts,))
    out.check((tokens, top_k))
    if slots.shape != (tokens,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots are int64 [{tokens}], not {slots.dtype} {tuple(slots.shape)}")
    if not tokens:
        return
    block = triton.next_power_of_2(experts)
    _route[(tokens,)](
        logits, slots, tables.up, tables.down, out.ids, out.weights, out.addresses.up, out.addresses.down,
        logits.stride(0), EXPERTS=experts, TOP_K=top_k, RENORMALISE=renormalise, SCORE=SOFTMAX, BLOCK=block,
        CHOSEN=triton.next_power_of_2(top_k), num_warps=_warps(block),
    )  # fmt: skip


def _warps(block: int) -> int:
    return max(1, block // 256)  # one warp needs no barrier


def variants() -> Iterator[Variant]:
    types = {"logits": "*fp32", "slots": "*i64", "ids": "*i32", "weights": "*fp32", "logits_row": "i32"}
    types |= dict.fromkeys(("up_table", "down_table", "up_address", "down_address"), "*i64")
    for experts, top_k, renormalise in ((128, 8, True), (60, 4, False), (512, 10, True), (1024, 32, False)):
        block = triton.next_power_of_2(experts)
        constants: dict[str, object] = {
            "EXPERTS": experts, "TOP_K": top_k, "RENORMALISE": renormalise, "SCORE": SOFTMAX, "BLOCK": block,
            "CHOSEN": triton.next_power_of_2(top_k),
        }  # fmt: skip
        yield Variant(_route, types, constants, warps=_warps(block), aligned=("logits",))
