"""Routed experts for very many tokens per expert: quantised matrices are dequantised to bfloat16 rows, some experts at
a time, and the tensor cores multiply the rows. Never: grouping pairs (experts_grouped.py), residency.

A product that decodes panels itself does so once for each block of 128 pairs, which takes longer than the products.
Weights are rounded as there: each one times its scale, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import PANEL_ROWS, Form, Format, Layout, facts
from proa.native.weights import Activation
from proa.ops.residency import ExpertShape, Located, PairBias
from proa.ops.sizes import BLOCK_TOKENS, most_blocks
from proa.ops.triton.experts_grouped import Groups
from proa.ops.triton.panels import ROWS, activated, constants, panel_rows
from proa.ops.triton.variant import Variant

BLOCK = BLOCK_TOKENS[-1]  # pairs of a block
_LINES, _WARPS = 64, 4  # of the kernel that dequantises


@dataclass(frozen=True)
class Tile:
    """Rows of weights and columns per step of a product; stages; warps."""

    rows: int
    columns: int
    stages: int
    warps: int

    @property
    def shared_bytes(self) -> int:
        return 2 * self.stages * self.columns * (BLOCK + self.rows)


# The first one that fits into a thread block's shared memory.
_TILES = (Tile(256, 64, 4, 8), Tile(128, 64, 3, 4), Tile(128, 32, 3, 4))


@dataclass(frozen=True)
class RowsSpace:
    """Buffers of a call. rows: dequantised matrices of some experts."""

    rows: Tensor  # bfloat16 [any]
    up: Tensor  # int64 [E]: address of each expert's gate and up; 0: no pairs, or not computed here
    down: Tensor  # int64 [E]
    begins: Tensor  # int32 [E + 1]: each expert's first block of pairs
    tile: Tile


def rows_space(nbytes: int, experts: int, of: ExpertShape, shared_bytes: int, device: torch.device) -> RowsSpace | None:
    """Allocate at most `nbytes` for rows; None if no expert fits. shared_bytes: a thread block's shared memory."""
    most = max(map(_row_bytes, (of.up, of.down)))
    if nbytes < most:
        return None
    rows = torch.empty(min(nbytes, experts * most) // 2, dtype=torch.bfloat16, device=device)
    up, down = (torch.empty(experts, dtype=torch.int64, device=device) for _ in range(2))
    begins = torch.empty(experts + 1, dtype=torch.int32, device=device)
    return RowsSpace(rows, up, down, begins, tile_for(shared_bytes))


def tile_for(shared_bytes: int) -> Tile:
    return next((tile for tile in _TILES if tile.shared_bytes <= shared_bytes), _TILES[-1])


def _row_bytes(of: Layout) -> int:
    """Bytes of a matrix as rows, whose number is a multiple of PANEL_ROWS."""
    return 2 * of.panels * PANEL_ROWS * of.columns


@triton.jit(do_not_specialize=["block"])
def _find(
    up, down, counts, order, blocks, up_of, down_of, begins, block, EXPERTS: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    """Per expert: where its blocks begin, and the addresses that its pairs have."""
    expert, other = tl.program_id(0), tl.arange(0, ALL)
    filled = tl.cdiv(tl.load(counts + other, other < EXPERTS, 0), block)
    begin = tl.sum(tl.where(other < expert, filled, 0), 0)
    tl.store(begins + expert, begin)
    if expert == EXPERTS - 1:
        tl.store(begins + EXPERTS, tl.load(blocks))
    used = tl.load(counts + expert) > 0
    pair = tl.load(order + begin * block, used, 0)
    tl.store(up_of + expert, tl.load(up + pair, used, 0))
    tl.store(down_of + expert, tl.load(down + pair, used, 0))


@triton.jit(do_not_specialize=["first"])
def _unpack(
    address, rows, first,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, VALUES: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """Dequantise some lines of a panel. PAIRED: panels alternate between gate and up, and so will rows."""
    number, panel, start = tl.program_id(0), tl.program_id(1), tl.program_id(2) * LINES
    matrix = tl.load(address + first + number)
    if matrix == 0:
        return
    values = panel_rows(
        matrix, panel.to(tl.int64), start, CODE, SCALE, PANEL_LINES, PANEL_WORDS, GROUP, LINES, VALUES
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    row = panel // 2 * (2 * ROWS) + 2 * row + panel % 2 if PAIRED else panel * ROWS + row
    column = start * VALUES + tl.arange(0, LINES * VALUES)
    at = rows + (number.to(tl.int64) * (COUNT * ROWS) + row[:, None]) * COLUMNS + column[None, :]
    if PANEL_LINES % LINES == 0 and PANEL_LINES * VALUES == COLUMNS:
        tl.store(at, values)
    else:
        tl.store(at, values, (column < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["first", "count"])
def _multiply(
    x, rows, address, ids, bias, order, begins, out, first, count, x_row, out_row,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products of one block of pairs with N rows of its expert's matrix. Blocks of one expert are neighbours in the
    grid and share its rows in L2. For the other arguments see experts_few._pair."""
    block, part = tl.load(begins + first) + tl.program_id(0), tl.program_id(1)
    if block >= tl.load(begins + first + count):
        return
    expert = tl.load(ids + tl.load(order + block * BLOCK))
    if tl.load(address + expert) == 0:
        return
    pair = tl.load(order + block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    exists = pair >= 0
    row = part * N + tl.arange(0, N)
    inside = row < COUNT * ROWS
    column = tl.arange(0, K)
    x_at = x + (tl.maximum(pair, 0) // SHARE)[:, None] * x_row + column[None, :]
    matrix = rows + (expert - first).to(tl.int64) * (COUNT * ROWS * COLUMNS)
    w_at = matrix + tl.where(inside, row, 0)[None, :] * COLUMNS + column[:, None]
    sums = tl.zeros([BLOCK, N], tl.float32)
    for start in tl.range(0, COLUMNS, K, num_stages=STAGES):
        if COLUMNS % K == 0:
            value, weight = tl.load(x_at + start, exists[:, None], 0.0), tl.load(w_at + start)
        else:
            left = column < COLUMNS - start
            value = tl.load(x_at + start, exists[:, None] & left[None, :], 0.0)
            weight = tl.load(w_at + start, left[:, None], 0.0)
        sums = tl.dot(value, weight, sums)
    if bias is not None:
        place = row if ACTIVATION is None else row // (2 * ROWS) * (2 * ROWS) + row % 2 * ROWS + row % (2 * ROWS) // 2
        sums += tl.load(bias + expert.to(tl.int64) * (COUNT * ROWS) + place, inside, 0.0)[None, :]
    if ACTIVATION is None:
        y, at = sums, row
    else:
        gate, up = tl.split(tl.reshape(sums, [BLOCK, N // 2, 2]))
        y, at = activated(gate, up, ACTIVATION, LIMIT), part * (N // 2) + tl.arange(0, N // 2)
    written = exists[:, None] & (at < WIDTH)[None, :]
    tl.store(out + pair[:, None] * out_row + at[None, :], y.to(out.dtype.element_ty), written)


def find(at: Located, by: Groups, to: RowsSpace) -> None:
    """Write the experts' addresses and first blocks. by: pairs grouped into blocks of BLOCK."""
    experts = len(by.counts)
    _find[(experts,)](
        at.up, at.down, by.counts, by.order, by.blocks, to.up, to.down, to.begins, BLOCK,
        EXPERTS=experts, ALL=triton.next_power_of_2(experts),
    )  # fmt: skip


def gate_up_rows(
    x: Tensor, at: Located, by: Groups, of: ExpertShape, space: RowsSpace, h: Tensor, bias: PairBias | None = None
) -> None:
    """experts_few.gate_up for pairs grouped into blocks of BLOCK, after `find`."""
    which = {"WIDTH": of.width, "SHARE": at.ids.shape[1], "ACTIVATION": int(of.activation), "LIMIT": of.limit}
    _products(x, at, by, of.up, space, space.up, h, bias, which)


def down_rows(
    h: Tensor, at: Located, by: Groups, of: ExpertShape, space: RowsSpace, partial: Tensor,
    bias: PairBias | None = None,
) -> None:  # fmt: skip
    """experts_few.down for pairs grouped into blocks of BLOCK, after `find`."""
    which = {"WIDTH": of.hidden, "SHARE": 1, "ACTIVATION": None, "LIMIT": 0.0}
    _products(h, at, by, of.down, space, space.down, partial, bias, which)


def _products(
    x: Tensor, at: Located, by: Groups, of: Layout, space: RowsSpace, address: Tensor, out: Tensor,
    bias: PairBias | None, which: Mapping[str, object],
) -> None:  # fmt: skip
    """For as many experts at a time as the space has room for: dequantise, multiply."""
    total, tile = len(by.counts), space.tile
    each = min(total, 2 * len(space.rows) // _row_bytes(of))
    blocks = most_blocks(at.ids.numel(), total, BLOCK)
    unpacking, multiplying = _constants(of, which, tile)
    for first in range(0, total, each):
        count = min(each, total - first)
        lines = triton.cdiv(unpacking["PANEL_LINES"], unpacking["LINES"])
        _unpack[(count, of.panels, lines)](address, space.rows, first, **unpacking, num_warps=_WARPS)
        _multiply[(blocks, triton.cdiv(of.panels * PANEL_ROWS, tile.rows))](
            x, space.rows, address, at.ids, None if bias is None else bias.of, by.order, space.begins, out,
            first, count, x.stride(0), out.stride(0), **multiplying, num_warps=tile.warps,
        )  # fmt: skip


def _constants(of: Layout, which: Mapping[str, object], tile: Tile) -> tuple[dict[str, object], dict[str, object]]:
    """Constants of the two kernels."""
    known = constants(of, of.columns) | {
        "LINES": _LINES // (4 if facts(of.format).unit_words > 1 else 1),
        "PAIRED": which["ACTIVATION"] is not None,
    }
    blocks = {"BLOCK": BLOCK, "COLUMNS": of.columns, "COUNT": of.panels}
    return (
        {name: value for name, value in known.items() if name in _unpack.arg_names},
        {**which, **blocks, "N": tile.rows, "K": tile.columns, "STAGES": tile.stages},
    )


def variants() -> Iterator[Variant]:
    types = dict.fromkeys(("up", "down", "up_of", "down_of"), "*i64")
    types |= dict.fromkeys(("counts", "order", "blocks", "begins"), "*i32") | {"block": "i32"}
    yield Variant(_find, types, {"EXPERTS": 128, "ALL": 128})
    int4, mxfp4 = Form(Format.INT4_F16, 32), Form(Format.MXFP4, 32)
    gpt_oss = ExpertShape(2880, 2880, mxfp4, mxfp4, Activation.CLAMPED_SWIGLU, 7.0)
    for of, biased in ((ExpertShape(2048, 768, int4, int4), False), (gpt_oss, True)):
        for up in (True, False):
            for tile in _TILES:
                yield from _variants_of(of, up, tile, biased)


def _variants_of(of: ExpertShape, up: bool, tile: Tile, biased: bool) -> Iterator[Variant]:
    which: dict[str, object] = {"WIDTH": of.width if up else of.hidden, "SHARE": 8 if up else 1}
    which |= {"ACTIVATION": int(of.activation) if up else None, "LIMIT": of.limit if up else 0.0}
    unpacking, multiplying = _constants(of.up if up else of.down, which, tile)
    types = {"address": "*i64", "rows": "*bf16", "first": "i32"}
    yield Variant(_unpack, types, unpacking, warps=_WARPS, aligned=("address", "rows"))
    types = types | {"x": "*bf16", "ids": "*i32", "order": "*i32", "begins": "*i32", "out": "*bf16" if up else "*fp32"}
    types |= dict.fromkeys(("count", "x_row", "out_row"), "i32") | ({"bias": "*fp32"} if biased else {})
    aligned = ("x", "rows", "address", "ids", "order", "begins", "out", "x_row", "out_row")
    yield Variant(
        _multiply, types, multiplying | ({} if biased else {"bias": None}), warps=tile.warps, aligned=aligned,
        shared_kib=-(-tile.shared_bytes // 1024),
    )  # fmt: skip
