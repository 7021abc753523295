"""Routed experts of few tokens: each choice of a token (a pair) reads its expert by itself, at the speed of memory.
Never: many tokens (experts_grouped.py), which would read an expert once for each.

A program reads whole panels in the order in which they lie, copied ahead into shared memory: 8 KiB a stage, three
under way. At one token and top 8 of 2048/768 that is 384 programs, about 70 KiB under way an SM. What it costs beside
that is its beginning and its end, when memory has nothing to do: gate_up ends by fetching some of down into L2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from proa.ops.residency import ExpertShape
from proa.ops.triton import early
from proa.ops.triton.panels import VALUES, activated, constants, panel_sums
from proa.ops.triton.variant import Variant

MOST_AHEAD_BYTES = 12 << 20  # of down: some 3 us of an H200's memory, a quarter of its L2
LINE_BYTES = 128  # of L2
LINE_WORDS = tl.constexpr(LINE_BYTES // 4)
_NOTHING_AHEAD = {"AHEAD": 0, "NEXT_WORDS": 0, "NEXT_COUNT": 0, "BLOCKS": 0}


@dataclass(frozen=True)
class Tile:
    """Panels of a program, lines of a stage, stages, warps."""

    panels: int
    lines: int
    stages: int
    warps: int


_TILES = {"up": Tile(2, 64, 4, 4), "down": Tile(2, 64, 4, 4)}


@triton.jit
def _fetch_share(
    address, block, AHEAD: tl.constexpr, WORDS: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Bring a program's share of the first AHEAD lines of each of COUNT panels into L2."""
    SHARE: tl.constexpr = (COUNT * AHEAD + BLOCKS - 1) // BLOCKS
    mine = tl.minimum(tl.arange(0, triton.next_power_of_2(SHARE)), SHARE - 1)
    line = tl.minimum(block * SHARE + mine, COUNT * AHEAD - 1)
    words = address.to(tl.pointer_type(tl.int32))
    early.fetch(words + (line // AHEAD).to(tl.int64) * WORDS + line % AHEAD * LINE_WORDS)


@triton.jit
def _pair(
    x, address, ids, next_table, out, x_row, out_row,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr,
    COUNT: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, VALUES: tl.constexpr,
    AHEAD: tl.constexpr, NEXT_WORDS: tl.constexpr, NEXT_COUNT: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Pairs run side by side, so that those of one expert find its panel in L2. SHARE pairs read the same row of x.

    ACTIVATION None: the sums themselves, [pairs, WIDTH]; else panels are of gate and up, by turns. AHEAD lines are
    fetched of each panel of the expert's in `next_table`.
    """
    if ACTIVATION is None:
        early.begin_near(EARLY)
    else:
        early.begin(EARLY)
    pair, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = tl.load(address + pair)
    if expert == 0:
        return
    if AHEAD > 0:
        following = tl.load(next_table + tl.load(ids + pair))  # before the weights, which it would wait for
    row = x + (pair // SHARE) * x_row
    sums = panel_sums(
        expert, block * PANELS, row, FORMAT, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, PANELS, LINES, STAGES, VALUES
    )
    if AHEAD > 0 and following != 0:
        _fetch_share(following, block, AHEAD, NEXT_WORDS, NEXT_COUNT, BLOCKS)
    if ACTIVATION is None:
        y = tl.reshape(sums, [PANELS * 16])
        at = block * PANELS * 16 + tl.arange(0, PANELS * 16)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [PANELS // 2, 2, 16]), (0, 2, 1)))
        y = tl.reshape(activated(gate, up, ACTIVATION), [PANELS * 8])
        at = block * PANELS * 8 + tl.arange(0, PANELS * 8)
    tl.store(out + pair * out_row + at, y.to(out.dtype.element_ty), at < WIDTH)


@dataclass(frozen=True)
class Next:
    """What is read after gate_up: of each pair's expert, down in `table`, int64 [E] addresses in VRAM; 0: nothing."""

    ids: Tensor  # int32 [T, k], not negative where gate and up have an address
    table: Tensor


def gate_up(x: Tensor, up_address: Tensor, of: ExpertShape, h: Tensor, soon: Next | None = None) -> None:
    """h [T * k, width] = activation(gate x) * (up x) of the pairs whose address is not 0; the others' rows stay.

    x bfloat16 [T, hidden], up_address int64 [T, k], h bfloat16. Columns side by side.
    """
    pairs, share = up_address.numel(), up_address.shape[1]
    tile = _TILES["up"]
    grid = (pairs, triton.cdiv(of.up.panels, tile.panels))
    how = early.options(x.device)
    soon = soon if how["EARLY"] else None
    ids, table = (None, None) if soon is None else (soon.ids, soon.table)
    ahead = _NOTHING_AHEAD if soon is None else _lines_ahead(of, *grid)
    _pair[grid](
        x, up_address, ids, table, h, x.stride(0), h.stride(0), WIDTH=of.width, SHARE=share,
        ACTIVATION=int(of.activation), **_constants(of, True, tile), **ahead, **how, num_warps=tile.warps,
    )  # fmt: skip


def down(h: Tensor, down_address: Tensor, of: ExpertShape, partial: Tensor) -> None:
    """partial float32 [T * k, hidden] = down h of the pairs whose address is not 0; the others' rows stay."""
    pairs = down_address.numel()
    tile = _TILES["down"]
    grid = (pairs, triton.cdiv(of.down.panels, tile.panels))
    _pair[grid](
        h, down_address, None, None, partial, h.stride(0), partial.stride(0), WIDTH=of.hidden, SHARE=1,
        ACTIVATION=None, **_constants(of, False, tile), **_NOTHING_AHEAD, **early.options(h.device),
        num_warps=tile.warps,
    )  # fmt: skip


def _lines_ahead(of: ExpertShape, pairs: int, blocks: int) -> dict[str, int]:
    """How much of down's panels gate_up fetches: together what memory gives between the two, or all."""
    panel = of.down.panel_bytes // LINE_BYTES
    lines = min(panel, MOST_AHEAD_BYTES // LINE_BYTES // (pairs * of.down.panels))
    return {"AHEAD": lines, "NEXT_WORDS": of.down.panel_bytes // 4, "NEXT_COUNT": of.down.panels, "BLOCKS": blocks}


def _constants(of: ExpertShape, up: bool, tile: Tile) -> dict[str, object]:
    blocks = {"PANELS": tile.panels, "LINES": tile.lines, "STAGES": tile.stages, "VALUES": VALUES[of.format]}
    return (constants(of.up, of.hidden) if up else constants(of.down, of.width)) | blocks


def variants() -> Iterator[Variant]:
    integers = dict.fromkeys(("x_row", "out_row"), "i32")
    shapes = (ExpertShape(2048, 768), ExpertShape(2880, 2880), ExpertShape(2048, 1408))
    for of, up, is_early in itertools.product(shapes, (True, False), (False, True)):
        tile = _TILES["up" if up else "down"]
        types = {"x": "*bf16", "address": "*i64", "out": "*bf16" if up else "*fp32"} | integers
        which: dict[str, object] = {
            "WIDTH": of.width if up else of.hidden,
            "SHARE": 8 if up else 1,
            "ACTIVATION": int(of.activation) if up else None,
            "EARLY": is_early,
        }
        which |= _constants(of, up, tile)
        if up and is_early:
            types |= {"ids": "*i32", "next_table": "*i64"}
            which |= _lines_ahead(of, 8, triton.cdiv(of.up.panels, tile.panels))
        else:
            which |= _NOTHING_AHEAD | {"ids": None, "next_table": None}
        aligned = ("x", "address", "out", "x_row", "out_row")
        least = early.LEAST if is_early else 75
        yield Variant(_pair, types, which, warps=tile.warps, aligned=aligned, least=least)
