"""The fused kernel between the projection of q, k, v and attention: norm per head, rotary embedding (arXiv 2104.09864),
store into the paged cache; and the gate of attention's output.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from proa.ops.caches import KvPages
from proa.ops.table import Angles, QkNorm
from proa.ops.triton.kv_codes import elements, store_rounded
from proa.ops.triton.variant import Variant

FEW_ROWS = 64  # up to this many, a program has one row; above, several


@triton.jit
def rotate_head(
    source, target, live, row, weight, cos, sin, eps, offset, inverse,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one head. Both elements of a rotary pair are read and written by one thread, so that source
    and target may be the same. inverse: see store_rounded."""
    size = 2 * HALF
    if NORM:
        column = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
        x = tl.load(source + column, live & (column < DIM), 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    if HALF > 0:
        pair = tl.arange(0, PAIRS)[None, :]
        some = live & (pair < HALF)
        first = 2 * pair if INTERLEAVED else pair
        second = first + (1 if INTERLEAVED else HALF)
        a, b = tl.load(source + first, some, 0.0).to(tl.float32), tl.load(source + second, some, 0.0).to(tl.float32)
        if NORM:
            a, b = a * scale, b * scale
            a *= tl.load(weight + first, pair < HALF, 0.0).to(tl.float32) + offset
            b *= tl.load(weight + second, pair < HALF, 0.0).to(tl.float32) + offset
            a, b = a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)
        c, s = tl.load(cos + row * HALF + pair, some, 0.0), tl.load(sin + row * HALF + pair, some, 0.0)
        store_rounded(target + first, a * c - b * s, some, inverse)
        store_rounded(target + second, b * c + a * s, some, inverse)
    if REST > 0:
        column = size + tl.arange(0, REST)[None, :]
        some = live & (column < DIM)
        x = tl.load(source + column, some, 0.0).to(tl.float32)
        if NORM:
            x = x * scale * (tl.load(weight + column, column < DIM, 0.0).to(tl.float32) + offset)
        store_rounded(target + column, x, some, inverse)


@triton.jit(do_not_specialize=["rows"])  # varies from step to step
def _rotate_store(
    q, kv, out, q_norm, k_norm, cos, sin, keys, values, slots, rows, heads, kv_heads, eps, offset, key_inverse,
    value_inverse, q_row, q_head, kv_row, out_row, page_stride, token_stride, head_stride,
    PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    slot = tl.load(slots + row, row < rows, -1)
    live = slot >= 0
    place = (slot // PAGE_TOKENS) * page_stride + (slot % PAGE_TOKENS) * token_stride
    if head < heads:
        source, target = q + row * q_row + head * q_head, out + row * out_row + head * DIM
        rotate_head(
            source, target, live, row, q_norm, cos, sin, eps, offset, 1.0, DIM, HALF, INTERLEAVED, NORM, PAIRS, REST
        )
    elif head < heads + kv_heads:
        source, target = kv + row * kv_row + (head - heads) * DIM, keys + place + (head - heads) * head_stride
        rotate_head(
            source, target, live, row, k_norm, cos, sin, eps, offset, key_inverse, DIM, HALF, INTERLEAVED, NORM, PAIRS,
            REST,
        )  # fmt: skip
    else:
        column = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
        some = live & (column < DIM)
        value = tl.load(kv + row * kv_row + (head - heads) * DIM + column, some)
        store_rounded(values + place + (head - heads - kv_heads) * head_stride + column, value, some, value_inverse)


def rotate_store(
    q: Tensor, kv: Tensor, norms: QkNorm | None, rotation: Angles, cache: KvPages, slots: Tensor, out: Tensor
) -> None:
    """Normalise and rotate q into out, which may be q; normalise and rotate k, and store it and v in the cache.

    bfloat16: q [T, heads, D], may be strided over heads; kv [T, 2 * kv_heads, D]: k and v, contiguous rows; out
    [T, heads, D], contiguous heads. The cache may be float8_e4m3fn (see KvPages). slots int64 [T]: rows of slot -1
    are skipped. The norm's result is rounded to bfloat16 before rotation. kv is not changed.
    """
    rows, heads, dim = q.shape
    page_tokens, kv_heads = cache.keys.shape[1], cache.keys.shape[2]
    _check(q, kv, rotation, cache, slots, out)
    if not rows:
        return
    block = 1 if rows <= FEW_ROWS else 8
    weights, eps, offset = ((None, None), 0.0, 0.0) if norms is None else ((norms.q, norms.k), norms.eps, norms.offset)
    _rotate_store[(triton.cdiv(rows, block), heads + 2 * kv_heads)](
        q, kv, out, *weights, rotation.cos, rotation.sin, *elements(cache), slots, rows, heads, kv_heads, eps, offset,
        1 / cache.key_scale, 1 / cache.value_scale, q.stride(0), q.stride(1), kv.stride(0), out.stride(0),
        *cache.keys.stride()[:3], PAGE_TOKENS=page_tokens,
        **_constants(dim, rotation.cos.shape[1], rotation.interleaved, norms is not None, block),
        num_warps=warps_for(block),
    )  # fmt: skip


def _check(q: Tensor, kv: Tensor, rotation: Angles, cache: KvPages, slots: Tensor, out: Tensor) -> None:
    rows, _, dim = q.shape
    kv_heads = cache.keys.shape[2]
    if kv.shape != (rows, 2 * kv_heads, dim) or kv.stride()[1:] != (dim, 1) or cache.keys.shape[3] != dim:
        raise ValueError(
            f"kv {tuple(kv.shape)} with strides {kv.stride()} does not fit a cache {tuple(cache.keys.shape)}"
        )
    if out.shape != q.shape or out.stride()[1:] != (dim, 1) or q.stride(2) != 1:
        raise ValueError(f"q {q.stride()} and out {tuple(out.shape)} {out.stride()} must have heads of {dim} elements")
    if cache.keys.stride() != cache.values.stride() or cache.keys.stride(3) != 1:
        raise ValueError(f"strides of keys and values must agree: {cache.keys.stride()} and {cache.values.stride()}")
    if slots.shape != (rows,) or not slots.is_contiguous():
        raise ValueError(f"slots must be int64 [{rows}], not {tuple(slots.shape)}")
    angles = rotation.cos
    if angles.shape != rotation.sin.shape or len(angles) != rows or 2 * angles.shape[1] > dim:
        raise ValueError(f"cos {tuple(angles.shape)}, sin {tuple(rotation.sin.shape)} do not fit {rows} rows of {dim}")
    if not (angles.is_contiguous() and rotation.sin.is_contiguous()):
        raise ValueError("cos and sin must be contiguous")


@triton.jit
def _gate(x, gate, x_row, gate_row, gate_head, DIM: tl.constexpr, WIDE: tl.constexpr):
    row, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    inside = column < DIM
    at = x + row * x_row + head * DIM + column
    z = tl.load(gate + row * gate_row + head * gate_head + column, inside, 0.0).to(tl.float32)
    y = tl.load(at, inside, 0.0).to(tl.float32) / (1.0 + tl.exp(-z))
    tl.store(at, y.to(tl.bfloat16), inside)


def gate(x: Tensor, gate: Tensor) -> None:
    """x *= sigmoid(gate), bfloat16 [T, heads, D]; x has contiguous heads, gate may be strided over heads."""
    rows, heads, dim = x.shape
    if gate.shape != x.shape or x.stride()[1:] != (dim, 1) or gate.stride(2) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.stride()} and gate {tuple(gate.shape)} {gate.stride()} do not fit")
    if rows:
        wide = triton.next_power_of_2(dim)
        _gate[(rows, heads)](x, gate, x.stride(0), *gate.stride()[:2], DIM=dim, WIDE=wide, num_warps=1)


def _constants(dim: int, half: int, interleaved: bool, norm: bool, rows: int) -> dict[str, int | bool]:
    rest = dim - 2 * half
    return {
        "DIM": dim,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "NORM": norm,
        "PAIRS": triton.next_power_of_2(half),
        "REST": triton.next_power_of_2(rest) if rest else 0,
        "ROWS": rows,
    }


def warps_for(rows: int) -> int:
    return min(4, rows)


def variants() -> Iterator[Variant]:
    tensors = dict.fromkeys(("q", "kv", "out", "keys", "values"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    tensors |= {"slots": "*i64"}
    strides = ("q_row", "q_head", "kv_row", "out_row", "page_stride", "token_stride", "head_stride")
    types = tensors | dict.fromkeys(("rows", "heads", "kv_heads", *strides), "i32")
    types |= dict.fromkeys(("eps", "offset", "key_inverse", "value_inverse"), "fp32")
    aligned = ("q", "kv", "out", "keys", "values", *strides)
    for dim, half, interleaved, norm, rows, kv in (
        (128, 64, False, True, 1, "*bf16"),
        (256, 32, False, True, 8, "*u8"),
        (80, 40, True, False, 8, "*u8"),
    ):
        types |= {"keys": kv, "values": kv}
        constants: dict[str, object] = {"PAGE_TOKENS": 16, **_constants(dim, half, interleaved, norm, rows)}
        weights = dict.fromkeys(("q_norm", "k_norm"), "*bf16") if norm else {}
        absent = {} if norm else dict.fromkeys(("q_norm", "k_norm"))
        yield Variant(_rotate_store, types | weights, constants | absent, warps=warps_for(rows), aligned=aligned)
    of_gate = dict.fromkeys(("x", "gate"), "*bf16") | dict.fromkeys(("x_row", "gate_row", "gate_head"), "i32")
    yield Variant(_gate, of_gate, {"DIM": 256, "WIDE": 256}, warps=1, aligned=tuple(of_gate))
