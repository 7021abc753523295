"""Routed experts for many tokens with weights and activations in e4m3 (fp8_rows.py); pairs are grouped by
experts_grouped.py. Never: rounding activations, residency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import E4M3_FORMS, Form, Layout
from proa.native.weights import Activation
from proa.ops.residency import ExpertShape, PairBias
from proa.ops.sizes import E4M3_ABOVE, E4M3_CAPABILITY, most_blocks
from proa.ops.triton.experts_few import matrix_constants, of_pairs
from proa.ops.triton.experts_grouped import Groups, fits
from proa.ops.triton.fp8_rows import Fp8Rows, fp8_rows, suits
from proa.ops.triton.panels import ROWS, activated, bias_at
from proa.ops.triton.panels_fp8 import fp8_constants, fp8_products, gate_and_up, in_order
from proa.ops.triton.variant import Variant

FP8_BLOCKS = (32, 64, 128)
_PANELS, _STAGES = 8, 3  # panels per program, and stages: shared memory stays below sm_120's 99 KiB


@dataclass(frozen=True)
class Fp8Space:
    """Rounded activations of a call, x and h; None if the weights they are multiplied with are not e4m3."""

    x: Fp8Rows | None
    h: Fp8Rows | None


def fp8_space(tokens: int, top_k: int, of: ExpertShape, device: torch.device) -> Fp8Space | None:
    """Allocate room for rounded activations; None if neither matrix of an expert is e4m3."""
    x = fp8_rows(tokens, of.up, device) if suits(of.up) else None
    h = fp8_rows(tokens * top_k, of.down, device) if suits(of.down) else None
    return Fp8Space(x, h) if x is not None or h is not None else None


def pays(pairs: int, experts: int) -> bool:
    """True if rounding activations to e4m3 is faster than decoding the weights to bfloat16.

    On an H200 (benchmarks/probes/gpu_fp8.py, 128 experts of 2048 x 768, top 8; us exact / rounded, with a scale per
    128 x 128, and per channel): 256 tokens 301 / 249, 263 / 242; 512 tokens 338 / 271, 335 / 259; 1024 tokens 480 /
    454, 485 / 420; 4096 tokens 1242 / 1192, 1248 / 934. Smaller blocks are bound by reading weights.
    """
    return pairs > E4M3_ABOVE * experts


def fp8_block_tokens(pairs: int, experts: int) -> int:
    """Block size of a call with rounded activations, one of FP8_BLOCKS."""
    return next(tokens for most, tokens in ((22, 32), (50, 64), (math.inf, 128)) if pairs <= most * experts)


@triton.jit
def _products(
    codes, scales, expert, ids, bias, pairs, out, codes_row, scales_row, out_row, part,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, TOKENS: tl.constexpr,
    SCALE: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr,
    BY_GROUP: tl.constexpr, LINES: tl.constexpr, PANELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See experts_grouped._products."""
    PAIRED: tl.constexpr = ACTIVATION is not None
    pair = tl.load(pairs + tl.arange(0, TOKENS)).to(tl.int64)
    row = tl.maximum(pair, 0) // SHARE
    sums = fp8_products(
        expert, part * PANELS, codes + row * codes_row, scales + row * scales_row,
        SCALE, PANEL_LINES, PANEL_WORDS, COUNT, BY_GROUP, LINES, PANELS, STAGES, PAIRED,
    )  # fmt: skip
    if bias is not None:
        places, exist = bias_at(bias, ids, tl.load(pairs), part * PANELS + tl.arange(0, PANELS), COUNT)
        sums += in_order(tl.load(places, exist, 0.0), PANELS, PAIRED)[:, None]
    if PAIRED:
        gate, up = gate_and_up(sums, PANELS)
        y = activated(gate, up, ACTIVATION, LIMIT)
        at = part * PANELS * 8 + tl.arange(0, PANELS * 8)
    else:
        y = sums
        at = part * PANELS * ROWS + tl.arange(0, PANELS * ROWS)
    inside = (pair >= 0)[:, None] & (at < WIDTH)[None, :]
    tl.store(out + pair[:, None] * out_row + at[None, :], tl.trans(y.to(out.dtype.element_ty)), inside)


@triton.jit
def _block(
    codes, scales, address, ids, bias, order, blocks, out, codes_row, scales_row, out_row,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    SCALE: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr,
    BY_GROUP: tl.constexpr, LINES: tl.constexpr, PANELS: tl.constexpr, STAGES: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """See experts_grouped._block."""
    part, block = tl.program_id(0), tl.program_id(1)
    if block >= tl.load(blocks):
        return
    pairs = order + block * BLOCK
    expert = tl.load(address + tl.load(pairs))
    if expert == 0:
        return
    HALF: tl.constexpr = BLOCK // 2
    QUARTER: tl.constexpr = BLOCK // 4
    if fits(pairs, QUARTER, BLOCK, LEAST):
        _products(
            codes, scales, expert, ids, bias, pairs, out, codes_row, scales_row, out_row, part, WIDTH, SHARE,
            ACTIVATION, LIMIT, QUARTER, SCALE, PANEL_LINES, PANEL_WORDS, COUNT, BY_GROUP, LINES, PANELS, STAGES,
        )  # fmt: skip
    elif fits(pairs, HALF, BLOCK, LEAST):
        _products(
            codes, scales, expert, ids, bias, pairs, out, codes_row, scales_row, out_row, part, WIDTH, SHARE,
            ACTIVATION, LIMIT, HALF, SCALE, PANEL_LINES, PANEL_WORDS, COUNT, BY_GROUP, LINES, PANELS, STAGES,
        )  # fmt: skip
    else:
        _products(
            codes, scales, expert, ids, bias, pairs, out, codes_row, scales_row, out_row, part, WIDTH, SHARE,
            ACTIVATION, LIMIT, BLOCK, SCALE, PANEL_LINES, PANEL_WORDS, COUNT, BY_GROUP, LINES, PANELS, STAGES,
        )  # fmt: skip


def multiply_fp8(
    x: Fp8Rows, address: Tensor, by: Groups, block_tokens: int, of: ExpertShape, out: Tensor,
    bias: PairBias | None = None, *, up: bool,
) -> None:  # fmt: skip
    """experts_grouped.multiply_blocks with rounded rows, made for the layout of that matrix."""
    packed, _ = of.matrix(up)
    grid = (triton.cdiv(packed.panels, _PANELS), most_blocks(address.numel(), len(by.counts), block_tokens))
    _block[grid](
        x.codes, x.scales, address, *of_pairs(bias), by.order, by.blocks, out, x.codes.stride(0), x.scales.stride(0),
        out.stride(0), BLOCK=block_tokens, **matrix_constants(of, up, address.shape[1]), **_constants(packed),
        num_warps=_warps(block_tokens),
    )  # fmt: skip


def _warps(block_tokens: int) -> int:
    return 8 if block_tokens == 128 else 4


def _constants(of: Layout) -> dict[str, object]:
    return fp8_constants(of) | {"PANELS": _PANELS, "STAGES": _STAGES, "LEAST": 32}


def variants() -> Iterator[Variant]:
    types = {"codes": "*fp8e4nv", "scales": "*fp32", "address": "*i64", "order": "*i32", "blocks": "*i32"}
    types |= dict.fromkeys(("codes_row", "scales_row", "out_row"), "i32")
    aligned = ("codes", "scales", "address", "order", "blocks", "out", "codes_row", "out_row")
    cases: list[tuple[Form, int, bool]] = [(form, size, False) for form in E4M3_FORMS for size in FP8_BLOCKS]
    for form, size, biased in [*cases, (E4M3_FORMS[0], 32, True)]:
        of = ExpertShape(2048, 768, form, form, Activation.SILU)
        for up in (True, False):
            made = _constants(of.matrix(up)[0]) | matrix_constants(of, up, 8) | {"BLOCK": size}
            made |= {} if biased else {"ids": None, "bias": None}
            given = types | {"out": "*bf16" if up else "*fp32"} | ({"ids": "*i32", "bias": "*fp32"} if biased else {})
            yield Variant(_block, given, made, warps=_warps(size), aligned=aligned, least=E4M3_CAPABILITY)
