"""Linear layers over packed weights (csrc/src/layout.h), for any number of rows. Belongs here: how programs share
panels and columns. Never: decoding (formats.py), unpacked bfloat16 weights (linear.py, cuBLAS).

One row: panels are summed on the CUDA cores, as for an expert; weights are not rounded. Up to 16: the tensor cores
multiply quantised values directly if possible. More: weights times scale are rounded to bfloat16 once. If there are too
few programs to saturate HBM, several share the columns of the same panels (split-K): each stores its partial sums, and
the last one to arrive adds them up, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import PANEL_ROWS, Form, Format, Layout, facts, layout
from proa.ops.triton.panels import ROWS, columns_of, constants, panel_products, panel_sums
from proa.ops.triton.panels_coded import MOST_ROWS, coded_columns, coded_products
from proa.ops.triton.variant import Variant

MOST_PROGRAMS = 396  # most programs that share columns
_LEAST_STEPS = 4  # fewest stages per program: as many as are in flight


@dataclass(frozen=True)
class Tile:
    """Rows of x (1: on the CUDA cores) and panels per program; lines per stage, stages, warps; most programs that share
    columns.

    lines: for one row, an upper bound in lines of one word; for more, in lines of bfloat16 (other formats use as many
    lines as hold the same columns).
    """

    tokens: int
    panels: int
    lines: int
    stages: int
    warps: int
    programs: int
    coded: bool = False  # quantised values are multiplied directly (panels_coded.py)


# With few rows, 3 programs on each of 132 SMs have about 36 KiB of weights in flight. With many, the traffic of partial
# sums would reach that of the weights, so fewer programs share columns.
_ONE, _ONE_OF_MANY_ROWS = Tile(1, 1, 64, 4, 4, MOST_PROGRAMS), Tile(1, 2, 64, 4, 4, MOST_PROGRAMS)
_MANY_ROWS = 16384  # rows of weights from which on two panels per program still give enough programs
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
    """The grid: blocks of tokens, parts of the panels, splits of the columns with `lines` of a panel each, read in
    stages of `stage` lines."""

    blocks: int
    parts: int
    splits: int
    lines: int
    stage: int


def _grid(tokens: int, of: Layout, tile: Tile) -> _Grid:
    panel_lines = of.padded_columns // facts(of.format).unit_values
    stage = _lines(panel_lines, of, tile.lines) if tile.tokens == 1 else columns_of(of, tile.lines)
    blocks, parts = max(1, triton.cdiv(tokens, tile.tokens)), triton.cdiv(of.panels, tile.panels)
    steps = triton.cdiv(panel_lines, stage)
    wanted = max(1, min(tile.programs // (blocks * parts), steps // _LEAST_STEPS))
    of_each = triton.cdiv(steps, wanted)
    return _Grid(blocks, parts, triton.cdiv(steps, of_each), of_each * stage, stage)


def _lines(panel_lines: int, of: Layout, most: int) -> int:
    """Lines per stage: as many as allowed, overshooting the panel's end by at most an eighth if possible. For lines of
    several words half as many, so that each thread still loads 16 bytes.
    """
    lines = most // (2 if facts(of.format).unit_words > 1 else 1)
    while lines > 16 and triton.cdiv(panel_lines, lines) * lines * 8 > panel_lines * 9:
        lines //= 2
    return lines


@triton.jit
def _added(sums, partial, arrived, split, place, at, SPLITS: tl.constexpr):
    """Store this program's partial sums and count it as arrived. Returns (is last, total); the total is valid only in
    the last program. place: index of this group of programs; at: offsets within its sums, constants, so that they take
    no registers.
    """
    partial += place.to(tl.int64) * SPLITS * sums.numel
    tl.store(partial + split * sums.numel + at, sums)
    tl.debug_barrier()  # the arrival below publishes the stores of all threads
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
    """Several rows. Blocks of tokens run in parallel and find panels in L2."""
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
    """Number of float32 for partial sums that `linear_packed` needs for `tokens` or `least_rows` rows, whichever is
    more."""
    tile = _tile(tokens, of)
    grid = _grid(tokens, of, tile)
    programs = grid.blocks * grid.parts * grid.splits if grid.splits > 1 else 0
    return programs * tile.tokens * tile.panels * PANEL_ROWS


def linear_packed(
    x: Tensor, panels: Tensor, of: Layout, bias: Tensor | None, out: Tensor, partial: Tensor, arrived: Tensor,
    least_rows: int = 1,
) -> None:  # fmt: skip
    """out = x @ weight^T + bias with float32 sums, where `panels` are `weight` packed in layout `of`. With fewer than
    least_rows rows of x, a row has the bits that it would have among so many.

    x bfloat16 [T, of.columns], panels uint8 [of.panels, of.panel_bytes] contiguous, bias float32 or bfloat16 [of.rows],
    out bfloat16 or float32 [T, of.rows]. Rows of x and out may be strided, columns not. partial float32
    [partial_floats(T or least_rows, of)] or more. arrived int32 [MOST_PROGRAMS], zeros before the first call and after
    each one; calls that share it must be ordered on one stream. Raises ValueError for other shapes, strides and dtypes.
    """
    tokens = len(x)
    kernel_rows = max(tokens, least_rows)
    _check(x, panels, of, bias, out, partial, arrived, kernel_rows)
    if not tokens:
        return
    tile = _tile(kernel_rows, of)
    grid = _grid(kernel_rows, of, tile)
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
    """Constants of the kernels. quads: x of one row can be loaded four elements at a time."""
    kinds: dict[str, object] = (
        {"QUADS": quads and of.columns % 4 == 0} if tile.tokens == 1 else {"BLOCK": tile.tokens, "CODED": tile.coded}
    )
    blocks = {"PANELS": tile.panels, "LINES": grid.stage, "STAGES": tile.stages}
    return constants(of, of.columns) | blocks | {"SPLITS": grid.splits, "PART_LINES": grid.lines} | kinds


def _check(
    x: Tensor, panels: Tensor, of: Layout, bias: Tensor | None, out: Tensor, partial: Tensor, arrived: Tensor,
    kernel_rows: int,
) -> None:  # fmt: skip
    tokens = len(x)
    if x.shape != (tokens, of.columns) or x.stride(1) != 1 or x.dtype != torch.bfloat16:
        raise ValueError(f"x must be bfloat16 [T, {of.columns}] with contiguous rows, not {x.dtype} {tuple(x.shape)}")
    if out.shape != (tokens, of.rows) or out.stride(1) != 1 or out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be [{tokens}, {of.rows}] with contiguous rows, not {out.dtype} {tuple(out.shape)}")
    if panels.shape != (of.panels, of.panel_bytes) or panels.dtype != torch.uint8 or not panels.is_contiguous():
        got = f"{panels.dtype} {tuple(panels.shape)}"
        raise ValueError(f"panels must be uint8 [{of.panels}, {of.panel_bytes}], not {got}")
    if bias is not None and (bias.shape != (of.rows,) or bias.stride(0) != 1):
        raise ValueError(f"the bias must be {of.rows} contiguous values, not {tuple(bias.shape)}")
    needed = partial_floats(kernel_rows, of)
    if partial.dtype != torch.float32 or partial.numel() < needed or not partial.is_contiguous():
        raise ValueError(f"partial must be float32 [{needed}] or more, not {partial.dtype} {tuple(partial.shape)}")
    if arrived.dtype != torch.int32 or arrived.numel() < MOST_PROGRAMS or not arrived.is_contiguous():
        raise ValueError(f"arrivals must be int32 [{MOST_PROGRAMS}], not {arrived.dtype} {tuple(arrived.shape)}")


# The experts' kernels are compiled for all formats; here only those whose loads differ.
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
