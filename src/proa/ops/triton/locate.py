"""Where each chosen expert is computed: looked up in the layer's residency, inside the graph. Never: moving experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.residency import Located, Residency
from proa.ops.triton import early
from proa.ops.triton.variant import Variant


@triton.jit
def _locate(ids, up_table, down_table, cpu_table, up, down, cpu, pairs, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    early.begin(EARLY)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids + pair, inside, -1)
    real = expert >= 0
    tl.store(up + pair, tl.load(up_table + expert, real, 0), inside)
    tl.store(down + pair, tl.load(down_table + expert, real, 0), inside)
    tl.store(cpu + pair, tl.load(cpu_table + expert, real, -1), inside)


BLOCK = 128


def locate(ids: Tensor, residency: Residency, out: Located) -> None:
    """ids int32 [T, k], -1 for nobody's. Raises ValueError for ids of another type."""
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids are int32 and contiguous, not {ids.dtype} of strides {ids.stride()}")
    pairs = ids.numel()
    if pairs:
        _locate[(triton.cdiv(pairs, BLOCK),)](
            ids, residency.up, residency.down, residency.cpu, out.up, out.down, out.cpu, pairs, BLOCK,
            **early.options(ids.device), num_warps=1,
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    return early.both(_plain())


def _plain() -> Iterator[Variant]:
    types = {"ids": "*i32", "pairs": "i32", "cpu_table": "*i32", "cpu": "*i32"}
    types |= dict.fromkeys(("up_table", "down_table", "up", "down"), "*i64")
    yield Variant(_locate, types, {"BLOCK": BLOCK}, warps=1)
