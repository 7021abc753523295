"""Dequantises packed weights to rows of bfloat16, for so many tokens that cuBLAS is worth the copy. Never: products.

A program converts a few lines of one panel. Each weight times its scale is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import PANEL_ROWS, Form, Format, Layout, facts, layout
from proa.ops.triton.panels import ROWS, constants, panel_rows
from proa.ops.triton.variant import Variant

_LINES, _WARPS = 64, 4  # 4 KiB of words


@triton.jit
def _unpack(
    weight, out, out_row, rows,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    panel, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINES
    values = panel_rows(weight, panel, start, CODE, SCALE, PANEL_LINES, PANEL_WORDS, GROUP, LINES, VALUES)
    row = (panel * ROWS + tl.arange(0, ROWS))[:, None]
    column = (start * VALUES + tl.arange(0, LINES * VALUES))[None, :]
    tl.store(out + row * out_row + column, values, (row < rows) & (column < COLUMNS))


def unpack(panels: Tensor, of: Layout, out: Tensor) -> None:
    """out bfloat16 [rows, of.columns] = the first rows of `panels`, uint8 [any, of.panel_bytes], packed in layout `of`.

    out has contiguous columns. Raises ValueError for other shapes and dtypes, and for more rows than the panels have.
    """
    rows = len(out)
    if out.shape != (rows, of.columns) or out.dtype != torch.bfloat16 or out.stride(1) != 1:
        got = f"{out.dtype} {tuple(out.shape)}"
        raise ValueError(f"out must be bfloat16 [rows, {of.columns}] with contiguous rows, not {got}")
    if panels.dtype != torch.uint8 or panels.shape[1:] != (of.panel_bytes,) or not panels.is_contiguous():
        raise ValueError(f"panels must be uint8 [any, {of.panel_bytes}], not {panels.dtype} {tuple(panels.shape)}")
    if rows > len(panels) * PANEL_ROWS:
        raise ValueError(f"{rows} rows are more than {len(panels)} panels hold")
    if not rows:
        return
    sizes = _constants(of)
    grid = (triton.cdiv(rows, PANEL_ROWS), triton.cdiv(sizes["PANEL_LINES"], sizes["LINES"]))
    _unpack[grid](panels.view(torch.int32), out, out.stride(0), rows, **sizes, num_warps=_WARPS)


def _constants(of: Layout) -> dict[str, object]:
    known = constants(of, of.columns) | {"LINES": _LINES // (4 if facts(of.format).unit_words > 1 else 1)}
    return {name: value for name, value in known.items() if name in _unpack.arg_names}


def variants() -> Iterator[Variant]:
    types = {"weight": "*i32", "out": "*bf16", "out_row": "i32", "rows": "i32"}
    for form in (Form(Format.FP8_PANEL, 128), Form(Format.Q4_K, 32), Form(Format.Q6_K, 16)):
        of = layout(form.format, 5120, 2048, form.group)
        yield Variant(_unpack, types, _constants(of), warps=_WARPS, aligned=("weight", "out", "out_row"))
