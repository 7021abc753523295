"""The fused kernel before latent attention: norm of the latents, rotary embedding (arXiv 2104.09864) of queries and
keys, store into the paged cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import LatentPages
from proa.ops.table import Angles, Norm
from proa.ops.triton.heads import FEW_ROWS, rotate_head, warps_for
from proa.ops.triton.variant import Variant


@triton.jit(do_not_specialize=["rows"])  # varies from step to step
def _latent_store(
    q, kv, weight, cos, sin, cache, slots, rows, heads, eps, offset, q_row, kv_row, page_stride, token_stride,
    PAGE_TOKENS: tl.constexpr, PLAIN: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, RANK: tl.constexpr,
    PAIRS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    slot = tl.load(slots + row, row < rows, -1)
    live = slot >= 0
    if head < heads:
        at = q + row * q_row + head * (PLAIN + 2 * HALF) + PLAIN
        rotate_head(at, at, live, row, None, cos, sin, eps, offset, 1.0, 2 * HALF, HALF, INTERLEAVED, False, PAIRS, 0)
    else:
        source = kv + row * kv_row
        target = cache + (slot // PAGE_TOKENS) * page_stride + (slot % PAGE_TOKENS) * token_stride
        rotate_head(source, target, live, row, weight, cos, sin, eps, offset, 1.0, RANK, 0, INTERLEAVED, True, 0, WIDE)
        source, target = source + RANK, target + RANK
        rotate_head(
            source, target, live, row, None, cos, sin, eps, offset, 1.0, 2 * HALF, HALF, INTERLEAVED, False, PAIRS, 0
        )  # fmt: skip


def latent_store(q: Tensor, kv: Tensor, norm: Norm, rotation: Angles, cache: LatentPages, slots: Tensor) -> None:
    """Rotate the last R dims of each head of q, in place; normalise latents, rotate the keys behind them, store both.

    bfloat16: q [T, heads, K + R], contiguous heads; kv [T, rank + R], contiguous rows. slots int64 [T]: rows of slot
    -1 are skipped. kv is not changed.
    """
    rows, heads, dim = q.shape
    page_tokens, width = cache.rows.shape[1:]
    half = rotation.cos.shape[1]
    if kv.shape != (rows, width) or kv.stride(1) != 1 or width != cache.rank + 2 * half or dim < 2 * half:
        raise ValueError(f"q {tuple(q.shape)} and kv {tuple(kv.shape)} do not fit a cache {tuple(cache.rows.shape)}")
    if q.stride()[1:] != (dim, 1) or cache.rows.stride(2) != 1 or norm.weight.shape != (cache.rank,):
        raise ValueError(f"q {q.stride()}, rows {cache.rows.stride()} or norm {tuple(norm.weight.shape)} do not fit")
    if slots.shape != (rows,) or not slots.is_contiguous():
        raise ValueError(f"slots must be int64 [{rows}], not {tuple(slots.shape)}")
    for angles in (rotation.cos, rotation.sin):
        if angles.shape != (rows, half) or not angles.is_contiguous():
            raise ValueError(f"cos and sin must be float32 [{rows}, {half}], contiguous, not {tuple(angles.shape)}")
    if not rows:
        return
    block = 1 if rows <= FEW_ROWS else 8
    _latent_store[(triton.cdiv(rows, block), heads + 1)](
        q, kv, norm.weight, rotation.cos, rotation.sin, cache.rows, slots, rows, heads, norm.eps, norm.offset,
        q.stride(0), kv.stride(0), *cache.rows.stride()[:2], PAGE_TOKENS=page_tokens,
        **_constants(dim - 2 * half, half, cache.rank, rotation.interleaved, block), num_warps=warps_for(block),
    )  # fmt: skip


def _constants(plain: int, half: int, rank: int, interleaved: bool, rows: int) -> dict[str, int | bool]:
    pairs, wide = triton.next_power_of_2(half), triton.next_power_of_2(rank)
    sizes: dict[str, int | bool] = {"PLAIN": plain, "HALF": half, "RANK": rank, "PAIRS": pairs, "WIDE": wide}
    return sizes | {"INTERLEAVED": interleaved, "ROWS": rows}


def variants() -> Iterator[Variant]:
    strides = ("q_row", "kv_row", "page_stride", "token_stride")
    types = dict.fromkeys(("q", "kv", "weight", "cache"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    types |= {"slots": "*i64", "eps": "fp32", "offset": "fp32"}
    types |= dict.fromkeys(("rows", "heads", *strides), "i32")
    for rows in (1, 8):
        constants: dict[str, object] = {"PAGE_TOKENS": 16, **_constants(128, 32, 512, True, rows)}
        aligned = ("q", "kv", "cache", *strides)
        yield Variant(_latent_store, types, constants, warps=warps_for(rows), aligned=aligned)
