"""Linear maps over packed weights (csrc/src/layout.h), for any number of rows. Belongs here: how programs share panels
and columns. Never: what codes mean (formats.py), weights that are rows of bfloat16 (linear.py, cuBLAS).

One row: panels are summed on the ordinary cores, as those of an expert; nothing of a weight is rounded. Up to 16: the
matrix unit multiplies codes as they are, where it can. More: a weight with its scale is rounded to bfloat16 once. Where
there are too few programs to keep all of HBM busy, several share the columns of the same panels: each leaves its sums,
and the last one to come adds them up, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import PANEL_ROWS, Form, Format, Layout, layout
from proa.ops.triton.formats import LINE_WORDS, VALUES
from proa.ops.triton.panels import ROWS, columns_of, constants, panel_products, panel_sums
from proa.ops.triton.panels_coded import MOST_ROWS, coded_columns, coded_products
from proa.ops.triton.variant import Variant

MOST_PROGRAMS = 396  # that share columns
_LEAST_STEPS = 4  # stages of a program's columns: as many as are under way


@dataclass(frozen=True)
class Tile:
    """Rows of x (1: on the ordinary cores) and panels of a program; lines of a stage, stages, warps; up to how many
    programs share columns.

    Lines: of one row at most so many of a word; of more as many as have the columns of so many of bfloat16.
    """

    tokens: int
    panels: int
    lines: int
    stages: int
    warps: int
    programs: int
    coded: bool = False  # codes are multiplied as they are (panels_coded.py)


# Of few rows, 3 programs for each of 132 SMs have some 36 KiB of weights under way there. Of many, sums that are left
# and read again become as many bytes as the weights.
_ONE, _ONE_OF_MANY_ROWS = Tile(1, 1, 64, 4, 4, MOST_PROGRAMS), Tile(1, 2, 64, 4, 4, MOST_PROGRAMS)
_MANY_ROWS = 16384  # of the weights, from which even two panels a program are enough programs
_BLOCKS = (
    Tile(16, 4, 64, 4, 4, MOST_PROGRAMS), Tile(32, 4, 32, 4, 4, 264), Tile(64, 8, 32, 3, 4, 198),
    Tile(128, 8, 32, 3, 8, 198),
)  # fmt: skip


def _tile(tokens: int, of: Layout) -> Tile:
    if tokens == 1:
        return _ONE_OF_MANY_ROWS if of.rows >= _MANY_ROWS else _ONE
    if tokens <= MOST_ROWS and (columns := coded_columns(of)) is not None:
        return Tile(MOST_ROWS, 4, columns // 2, 4, 4, MOST_PROGRAMS, coded=True)
    return next((tile for tile in _BLOCKS if tokens <= tile.tokens), _BLOCKS[-1])


@dataclass(frozen=True)
class _Grid:
    """Blocks of tokens, parts of the panels, and of the columns: `lines` of a panel each, in stages of `stage`."""

    blocks: int
    parts: int
    splits: int
    lines: int
    stage: int


def _grid(tokens: int, of: Layout, tile: Tile) -> _Grid:
    panel_lines = of.padded_columns // VALUES[of.format]
    stage = _lines(panel_lines, of, tile.lines) if tile.tokens == 1 else columns_of(of, tile.lines)
    blocks, parts = max(1, triton.cdiv(tokens, tile.tokens)), triton.cdiv(of.panels, tile.panels)
    steps = triton.cdiv(panel_lines, stage)
    wanted = max(1, min(tile.programs // (blocks * parts), steps // _LEAST_STEPS))
    of_each = triton.cdiv(steps, wanted)
    return _Grid(blocks, parts, triton.cdiv(steps, of_each), of_each * stage, stage)


def _lines(panel_lines: int, of: Layout, most: int) -> int:
    """Of a stage: as many as may be, at most an eighth beyond the panel's end, as far as that can be had. Of several
    words half as many, so that a word of them is still 16 bytes a thread.
    """
    lines = most // (2 if LINE_WORDS[of.format] > 1 else 1)
    while lines > 16 and triton.cdiv(panel_lines, lines) * lines * 8 > panel_lines * 9:
        lines //= 2
    return lines


@triton.jit
def _added(sums, partial, arrived, split, place, at, SPLITS: tl.constexpr):
    """Whether all parts have come, and their sum: of the last program to come alone. `place`: of those that belong
    together, among all; at: where each sum is among theirs, which are constants, so that no register holds them.
    """
    partial += place.to(tl.int64) * SPLITS * sums.numel
    tl.store(partial + split * sums.numel + at, sums)
    tl.debug_barrier()  # the arrival below tells of all threads' stores
    last = tl.atomic_add(arrived + place, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    total = sums
    if last:
        tl.store(arrived + place, 0)
        total = tl.zeros(sums.shape, tl.float32)
        for i in range(SPLITS):
            total += tl.load(partial + i * sums.numel + at, cache_modifier=".cg")
    return last, total


@triton.jit
def _one(
    x, weight, bias, out, partial, arrived, outputs,
    SPLITS: tl.constexpr, PART_LINES: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    part, split = tl.program_id(0), tl.program_id(1)
    begin = split * PART_LINES
    end = tl.minimum(begin + PART_LINES, PANEL_LINES)
    sums = panel_sums(
        weight, part * PANELS, x, begin, end,
        CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES, QUADS,
    )  # fmt: skip
    y = tl.reshape(sums, [PANELS * ROWS])
    row = part * PANELS * ROWS + tl.arange(0, PANELS * ROWS)
    inside = row < outputs
    if SPLITS > 1:
        last, y = _added(y, partial, arrived, split, part, tl.arange(0, PANELS * ROWS), SPLITS)
        inside = inside & last
    if bias is not None:
        y += tl.load(bias + row, inside, 0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def _many(
    x, weight, bias, out, partial, arrived, x_row, out_row, tokens, outputs,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PART_LINES: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Blocks of tokens run side by side, and find panels in L2."""
    block, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    exists = token < tokens
    begin = split * PART_LINES
    end = tl.minimum(begin + PART_LINES, PANEL_LINES)
    rows = x + tl.where(exists, token, 0) * x_row
    if CODED:
        y = coded_products(
            weight, part * PANELS, rows, exists, begin, end,
            CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES,
        )  # fmt: skip
    else:
        y = panel_products(
            weight, part * PANELS, rows, exists, begin, end,
            CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES,
        )  # fmt: skip
    row = part * PANELS * ROWS + tl.arange(0, PANELS * ROWS)
    inside = exists[:, None] & (row < outputs)[None, :]
    if SPLITS > 1:
        at = tl.arange(0, BLOCK)[:, None] * (PANELS * ROWS) + tl.arange(0, PANELS * ROWS)[None, :]
        last, y = _added(y, partial, arrived, split, block * tl.num_programs(1) + part, at, SPLITS)
        inside = inside & last
    if bias is not None:
        y += tl.load(bias + row, row < outputs, 0.0).to(tl.float32)[None, :]
    tl.store(out + token[:, None] * out_row + row[None, :], y.to(out.dtype.element_ty), inside)


def partial_floats(tokens: int, of: Layout) -> int:
    """How many float32 `linear_packed` needs between programs, for so many rows."""
    tile = _tile(tokens, of)
    grid = _grid(tokens, of, tile)
    programs = grid.blocks * grid.parts * grid.splits if grid.splits > 1 else 0
    return programs * tile.tokens * tile.panels * PANEL_ROWS


def linear_packed(
    x: Tensor, panels: Tensor, of: Layout, bias: Tensor | None, out: Tensor, partial: Tensor, arrived: Tensor
) -> None:
    """out = x @ weight^T + bias with float32 sums, where `panels` are `weight` packed as `of` says.

    x bfloat16 [T, of.columns], panels uint8 [of.panels, of.panel_bytes] contiguous, bias float32 or bfloat16 [of.rows],
    out bfloat16 or float32 [T, of.rows]. Rows of x and out may be strided, columns not. partial float32
    [partial_floats(T, of)] or more. arrived int32 [MOST_PROGRAMS], zeros before the first call and after each one:
    calls that share it follow one another. Raises ValueError for other shapes, strides and types.
    """
    _check(x, panels, of, bias, out, partial, arrived)
    tokens = len(x)
    if not tokens:
        return
    tile = _tile(tokens, of)
    grid = _grid(tokens, of, tile)
    words = panels.view(torch.int32)
    if tile.tokens == 1:
        quads = x.data_ptr() % 8 == 0
        _one[(grid.parts, grid.splits)](
            x, words, bias, out, partial, arrived, of.rows, **_constants(of, tile, grid, quads), num_warps=tile.warps
        )
    else:
        _many[(grid.blocks, grid.parts, grid.splits)](
            x, words, bias, out, partial, arrived, x.stride(0), out.stride(0), tokens, of.rows,
            **_constants(of, tile, grid), num_warps=tile.warps,
        )  # fmt: skip


def _constants(of: Layout, tile: Tile, grid: _Grid, quads: bool = True) -> dict[str, object]:
    """quads: x of one row can be read four values at a time."""
    kinds: dict[str, object] = (
        {"QUADS": quads and of.columns % 4 == 0} if tile.tokens == 1 else {"BLOCK": tile.tokens, "CODED": tile.coded}
    )
    blocks = {"PANELS": tile.panels, "LINES": grid.stage, "STAGES": tile.stages}
    return constants(of, of.columns) | blocks | {"SPLITS": grid.splits, "PART_LINES": grid.lines} | kinds


def _check(
    x: Tensor, panels: Tensor, of: Layout, bias: Tensor | None, out: Tensor, partial: Tensor, arrived: Tensor
) -> None:
    tokens = len(x)
    if x.shape != (tokens, of.columns) or x.stride(1) != 1 or x.dtype != torch.bfloat16:
        raise ValueError(f"x is bfloat16 [T, {of.columns}] with whole rows, not {x.dtype} {tuple(x.shape)}")
    if out.shape != (tokens, of.rows) or out.stride(1) != 1 or out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out is [{tokens}, {of.rows}] with whole rows, not {out.dtype} {tuple(out.shape)}")
    if panels.shape != (of.panels, of.panel_bytes) or panels.dtype != torch.uint8 or not panels.is_contiguous():
        raise ValueError(f"panels are uint8 [{of.panels}, {of.panel_bytes}], not {panels.dtype} {tuple(panels.shape)}")
    if bias is not None and (bias.shape != (of.rows,) or bias.stride(0) != 1):
        raise ValueError(f"the bias must be {of.rows} values side by side, not {tuple(bias.shape)}")
    needed = partial_floats(tokens, of)
    if partial.dtype != torch.float32 or partial.numel() < needed or not partial.is_contiguous():
        raise ValueError(f"between programs float32 [{needed}], not {partial.dtype} {tuple(partial.shape)}")
    if arrived.dtype != torch.int32 or arrived.numel() < MOST_PROGRAMS or not arrived.is_contiguous():
        raise ValueError(f"arrivals are int32 [{MOST_PROGRAMS}], not {arrived.dtype} {tuple(arrived.shape)}")


# Codes are compiled with the kernels of experts in all formats; here those whose loads differ.
_EXAMPLES = (
    Form(Format.FP8_PANEL, 128), Form(Format.INT8_F16, 32), Form(Format.Q4_K, 32), Form(Format.Q5_K, 32),
    Form(Format.Q6_K, 16),
)  # fmt: skip


def variants() -> Iterator[Variant]:
    types = {"x": "*bf16", "weight": "*i32", "partial": "*fp32", "arrived": "*i32"}
    types |= dict.fromkeys(("x_row", "out_row", "tokens", "outputs"), "i32")
    cases = [(form, tokens, 2048, 4096) for form in _EXAMPLES for tokens in (1, 16)]
    cases += [(_EXAMPLES[2], 1, 32768, 2048), (_EXAMPLES[2], 128, 5120, 2048), (_EXAMPLES[3], 64, 5120, 2048)]
    for form, tokens, rows, columns in cases:
        of = layout(form.format, rows, columns, form.group)
        tile = _tile(tokens, of)
        kernel, bias = _one if tokens == 1 else _many, "*bf16" if tokens == 1 else None
        given = types | {"out": "*bf16" if rows < _MANY_ROWS else "*fp32"} | ({"bias": bias} if bias else {})
        made = _constants(of, tile, _grid(tokens, of, tile)) | ({} if bias else {"bias": None})
        names = kernel.arg_names
        yield Variant(
            kernel,
            {n: t for n, t in given.items() if n in names},
            made,
            warps=tile.warps,
            aligned=tuple(n for n in ("x", "weight", "out", "partial", "x_row", "out_row") if n in names),
        )
