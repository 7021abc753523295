"""Linear maps over packed weights in e4m3, of many rows in e4m3 (fp8_rows.py). Belongs here: how programs share panels
and rows. Never: rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import E4M3_FORMS, Layout, layout
from proa.ops.triton.fp8_rows import COLUMNS, LEAST_CAPABILITY, Fp8Rows, suits
from proa.ops.triton.panels import ROWS
from proa.ops.triton.panels_fp8 import fp8_constants, fp8_products
from proa.ops.triton.variant import Variant


@dataclass(frozen=True)
class Tile:
    """Rows of x and panels of a program, stages, warps. Shared memory stays below sm_120's 99 KiB."""

    tokens: int
    panels: int
    stages: int
    warps: int


SMALL, LARGE = Tile(64, 8, 3, 4), Tile(128, 8, 3, 8)
ENOUGH_PROGRAMS = 132  # of large tiles; with fewer, twice as many small ones


def _tile(tokens: int, of: Layout) -> Tile:
    programs = triton.cdiv(tokens, LARGE.tokens) * triton.cdiv(of.panels, LARGE.panels)
    return LARGE if programs >= ENOUGH_PROGRAMS else SMALL


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    codes, scales, weight, bias, out, codes_row, scales_row, out_row, tokens, outputs,
    BLOCK: tl.constexpr, SCALE: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr,
    COUNT: tl.constexpr, BY_GROUP: tl.constexpr, LINES: tl.constexpr, PANELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks of tokens run side by side, and find panels in L2."""
    block, part = tl.program_id(0), tl.program_id(1)
    token = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    read = tl.minimum(token, tokens - 1)
    y = fp8_products(
        weight, part * PANELS, codes + read * codes_row, scales + read * scales_row,
        SCALE, PANEL_LINES, PANEL_WORDS, COUNT, BY_GROUP, LINES, PANELS, STAGES, False,
    )  # fmt: skip
    row = part * PANELS * ROWS + tl.arange(0, PANELS * ROWS)
    if bias is not None:
        y += tl.load(bias + row, row < outputs, 0.0).to(tl.float32)[:, None]
    inside = (token < tokens)[:, None] & (row < outputs)[None, :]
    tl.store(out + token[:, None] * out_row + row[None, :], tl.trans(y.to(out.dtype.element_ty)), inside)


def linear_fp8(x: Fp8Rows, panels: Tensor, of: Layout, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight^T + bias with float32 sums, where `panels` are `weight` packed as `of` says.

    x: T rows made for `of`; panels uint8 [of.panels, of.panel_bytes] contiguous, bias float32 or bfloat16 [of.rows],
    out bfloat16 or float32 [T, of.rows], rows of it may be strided. Raises ValueError for others.
    """
    tokens = len(x.codes)
    groups = -(-of.columns // COLUMNS)
    if not suits(of) or x.codes.shape[1] != groups * COLUMNS or x.scales.shape != (tokens, groups if of.group else 1):
        raise ValueError(f"rows {tuple(x.codes.shape)} by {tuple(x.scales.shape)} were not made for {of}")
    if out.shape != (tokens, of.rows) or out.stride(1) != 1 or out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out is [{tokens}, {of.rows}] with whole rows, not {out.dtype} {tuple(out.shape)}")
    if panels.shape != (of.panels, of.panel_bytes) or panels.dtype != torch.uint8 or not panels.is_contiguous():
        raise ValueError(f"panels are uint8 [{of.panels}, {of.panel_bytes}], not {panels.dtype} {tuple(panels.shape)}")
    if bias is not None and (bias.shape != (of.rows,) or bias.stride(0) != 1):
        raise ValueError(f"the bias must be {of.rows} values side by side, not {tuple(bias.shape)}")
    if not tokens:
        return
    tile = _tile(tokens, of)
    grid = (triton.cdiv(tokens, tile.tokens), triton.cdiv(of.panels, tile.panels))
    _linear[grid](
        x.codes, x.scales, panels.view(torch.int32), bias, out, x.codes.stride(0), x.scales.stride(0), out.stride(0),
        tokens, of.rows, **_constants(of, tile), num_warps=tile.warps,
    )  # fmt: skip


def _constants(of: Layout, tile: Tile) -> dict[str, object]:
    return fp8_constants(of) | {"BLOCK": tile.tokens, "PANELS": tile.panels, "STAGES": tile.stages}


def variants() -> Iterator[Variant]:
    types = {"codes": "*fp8e4nv", "scales": "*fp32", "weight": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("codes_row", "scales_row", "out_row", "tokens", "outputs"), "i32")
    aligned = ("codes", "scales", "weight", "out", "codes_row", "out_row", "outputs")
    for form in E4M3_FORMS:
        for tile, bias in ((SMALL, {}), (LARGE, {"bias": "*bf16"})):
            of = layout(form.format, 5120, 2048, form.group)
            made = _constants(of, tile) | ({} if bias else {"bias": None})
            yield Variant(
                _linear, types | bias, made, warps=tile.warps, aligned=aligned, least=LEAST_CAPABILITY
            )  # fmt: skip
