"""The lookup of where each chosen expert is computed, in the layer's residency table, inside the graph. Never: moving
experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.residency import IN_PLACE_PAIRS, Located, Residency
from proa.ops.triton.variant import Variant


@triton.jit
def _of_several(expert, missing, share, PAIRS: tl.constexpr):
    """True for the pairs of a step of several tokens that are read in place: see residency.InPlace."""
    pair = tl.arange(0, PAIRS)
    same = (expert[:, None] == expert[None, :]) & missing[:, None] & missing[None, :]
    alone = missing & (tl.sum(same.to(tl.int32), 1) == 1)
    before = tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
    misses = tl.sum((missing & (before == 0)).to(tl.int32), 0)  # experts
    kept = tl.sum(alone.to(tl.int32), 0) - tl.load(share + misses)
    return alone & (tl.cumsum(alone.to(tl.int32), 0) > kept)


@triton.jit
def places(
    expert, real, up_table, down_table, cpu_table, counts, up_place, down_place, share, PAIRS: tl.constexpr = 0,
):  # fmt: skip
    """Look up addresses and CPU numbers of experts int32 [n], where `real` is true. share: not None if some may be read
    in place; PAIRS: n if they belong to several tokens."""
    gate_up, low = tl.load(up_table + expert, real, 0), tl.load(down_table + expert, real, 0)
    number = tl.load(cpu_table + expert, real, -1)
    if share is not None:
        place = tl.load(up_place + expert, real, 0)
        missing = (number >= 0) & (place != 0)
        if PAIRS:
            fetched = _of_several(expert, missing, share, PAIRS)
        else:
            misses = tl.sum(missing.to(tl.int32), 0)
            kept = misses - tl.load(share + misses)
            fetched = missing & (tl.cumsum(missing.to(tl.int32), 0) > kept)
        gate_up = tl.where(fetched, place, gate_up)
        low = tl.where(fetched, tl.load(down_place + expert, real, 0), low)
        number = tl.where(fetched, -1, number)
    if counts is not None:
        tl.atomic_add(counts + expert, 1, real, sem="relaxed")
    return gate_up, low, number


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["counts"])  # vary by step and layer
def _locate(
    ids, up_table, down_table, cpu_table, counts, up_place, down_place, share, up, down, cpu, pairs,
    BLOCK: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids + pair, inside, -1)
    gate_up, low, number = places(
        expert, expert >= 0, up_table, down_table, cpu_table, counts, up_place, down_place, share,
        BLOCK if SEVERAL else 0,
    )  # fmt: skip
    tl.store(up + pair, gate_up, inside)
    tl.store(down + pair, low, inside)
    tl.store(cpu + pair, number, inside)


BLOCK = 128
_SEVERAL_WARPS = 4  # every pair is compared with every other one


def locate(ids: Tensor, residency: Residency, out: Located) -> None:
    """Look up ids int32 [T, k] in `residency` and write `out`; -1 is no expert and not counted. The kernel depends only
    on T and k. Raises ValueError for ids of another dtype."""
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids must be int32 and contiguous, not {ids.dtype} of strides {ids.stride()}")
    pairs = ids.numel()
    here = residency.in_place if pairs <= IN_PLACE_PAIRS else None
    places = (here.up, here.down, here.share) if here else (None, None, None)
    several = here is not None and len(ids) > 1
    block = max(16, triton.next_power_of_2(pairs)) if several else BLOCK
    if pairs:
        _locate[(triton.cdiv(pairs, block),)](
            ids, residency.up, residency.down, residency.cpu, residency.counts, *places, out.up, out.down, out.cpu,
            pairs, block, several, num_warps=_SEVERAL_WARPS if several else 1,
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    types = {"ids": "*i32", "pairs": "i32", "cpu_table": "*i32", "cpu": "*i32"}
    types |= dict.fromkeys(("up_table", "down_table", "up", "down"), "*i64")
    in_place = {"up_place": "*i64", "down_place": "*i64", "share": "*i32"}
    for more in ({}, {"counts": "*i32"}, in_place, {"counts": "*i32"} | in_place):
        absent = dict.fromkeys(name for name in ("counts", *in_place) if name not in more)
        yield Variant(_locate, types | more, {"BLOCK": BLOCK, "SEVERAL": False} | absent, warps=1)
    for block in (16, IN_PLACE_PAIRS):
        of = {"BLOCK": block, "SEVERAL": True}
        yield Variant(_locate, types | {"counts": "*i32"} | in_place, of, warps=_SEVERAL_WARPS)
