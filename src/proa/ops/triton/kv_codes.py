"""The e4m3 KV cache: bytes in memory, bfloat16 in registers. Belongs here: rounding, widening. Never: pages, scales.

GPUs from sm_89 on convert in hardware; on older ones the bits are shifted into a float16, which is then 2^8 too small.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import KvPages
from proa.ops.gpu_traits import traits_of

MOST_BITS: tl.constexpr = tl.constexpr(0x43E00000)  # bits of 448.0 in float32


def kind_of(pages: KvPages, native: bool | None = None) -> str:
    """The kernels' constant KV: how they read the cache. native: True if the GPU converts e4m3 in hardware; None: query
    the cache's device."""
    if pages.keys.dtype is not torch.float8_e4m3fn:
        return "bf16"
    return "e4m3" if (_native(pages.keys.device) if native is None else native) else "e4m3 by bits"


@cache
def _native(device: torch.device) -> bool:
    return device.type == "cuda" and traits_of(device).converts_e4m3


def elements(pages: KvPages) -> tuple[Tensor, Tensor]:
    """Keys and values as arguments of kernels: e4m3 as bytes, a type that Triton has on every GPU."""
    if pages.keys.dtype is not torch.float8_e4m3fn:
        return pages.keys, pages.values
    return pages.keys.view(torch.uint8), pages.values.view(torch.uint8)


@triton.jit
def load_rows(at, mask, KV: tl.constexpr):
    """Load keys or values as bfloat16, exactly as stored (unscaled); 0 where masked."""
    if KV == "bf16":
        return tl.load(at, mask, 0.0)
    elif KV == "e4m3":
        return tl.load(at, mask, 0).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        tl.static_assert(KV == "e4m3 by bits")
        words = tl.load(at, mask, 0).to(tl.int32)
        size = words & 0x7F
        half = ((size << 7) | ((words & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
        return tl.where(size == 0x7F, float("nan"), half.to(tl.float32) * 256.0).to(tl.bfloat16)


@triton.jit
def to_e4m3(x):
    """Round float32 to e4m3, to nearest, ties to even; finite values saturate at +-448, non-finite ones become NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    word = tl.minimum(size, MOST_BITS)
    held = word.to(tl.float32, bitcast=True)
    normal = ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14, whose unit in the last place is 2^-9, leaves a subnormal's bits at the bottom of the sum.
    tiny = (held + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size >= 0x7F800000, 0x7F, tl.where(held < 0.015625, tiny, normal))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_rounded(at, x, mask, inverse):
    """Store x, rounded to bfloat16; to an e4m3 cache, store to_e4m3(x * inverse)."""
    x = x.to(tl.bfloat16)
    if at.dtype.element_ty == tl.uint8:
        tl.store(at, to_e4m3(x.to(tl.float32) * inverse), mask)
    else:
        tl.store(at, x, mask)
