"""Routed experts for few tokens: every (token, expert) pair reads its expert by itself, at memory bandwidth.
Never: many tokens (experts_grouped.py), where each expert would be read once per token.

A program reads whole panels in memory order, prefetched into shared memory: 4 or 8 KiB per stage, three in flight. For
one token and top 8 of 2048/768 that is 384 programs for gate and up and 1024 for down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import BF16_FORM, Form, Format, Layout
from proa.native.weights import Activation
from proa.ops import pieces
from proa.ops.residency import ExpertShape, PairBias
from proa.ops.triton.formats import examples
from proa.ops.triton.panels import ROWS, activated, bias_at, constants, lines_of, panel_sums
from proa.ops.triton.variant import Variant

TAG, UNIT = tl.constexpr(pieces.TAG), tl.constexpr(pieces.UNIT_PANELS)


@dataclass(frozen=True)
class Tile:
    """Panels per program, lines per stage, stages, warps."""

    panels: int
    lines: int
    stages: int
    warps: int


# Measured tiles (docs/lab) for bfloat16 ("up of few": for up to _FEW pairs), and for formats that are decoded.
_FEW = 16
_TILES = {
    "up of few": Tile(2, 64, 4, 2), "up": Tile(2, 32, 4, 2), "down": Tile(1, 64, 4, 2), "decoded": Tile(2, 64, 4, 4)
}  # fmt: skip


@triton.jit
def _piece_at(address, panel):
    """The address that panel 0 would have if the whole matrix were in the piece of this panel: see ops/pieces.py."""
    if address & TAG:
        row = (address - TAG).to(tl.pointer_type(tl.int64))
        for i in range(tl.load(row).to(tl.int32)):
            address = tl.where(tl.load(row + 1 + 2 * i) <= panel, tl.load(row + 2 + 2 * i), address)
    return address


@triton.jit
def _pair(
    x, address, ids, bias, out, x_row, out_row,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr, QUADS: tl.constexpr, IN_PIECES: tl.constexpr,
):  # fmt: skip
    """Products of each pair's expert with its row. Pairs run in parallel, so that those of one expert find its panel in
    L2. SHARE consecutive pairs read the same row of x.

    ACTIVATION None: plain products, [pairs, WIDTH]; else panels alternate between gate and up. bias: None, or biases of
    all experts, indexed by ids. IN_PIECES: addresses may be tagged (ops/pieces.py); the check costs 1 to 2 % of the
    kernel's time for experts in VRAM.
    """
    pair, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = tl.load(address + pair)
    if expert == 0:
        return
    if IN_PIECES:
        tl.static_assert(PANELS <= UNIT)
        expert = _piece_at(expert, block * PANELS)
    row = x + (pair // SHARE) * x_row
    if bias is not None:  # loaded while the weights are in flight
        bias_places, exist = bias_at(bias, ids, pair, block * PANELS + tl.arange(0, PANELS), COUNT)
        biases = tl.load(bias_places, exist, 0.0)
    sums = panel_sums(
        expert, block * PANELS, row, 0, PANEL_LINES,
        CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES, QUADS,
    )  # fmt: skip
    if bias is not None:
        sums += biases
    if ACTIVATION is None:
        y = tl.reshape(sums, [PANELS * ROWS])
        at = block * PANELS * ROWS + tl.arange(0, PANELS * ROWS)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [PANELS // 2, 2, ROWS]), (0, 2, 1)))
        y = tl.reshape(activated(gate, up, ACTIVATION, LIMIT), [PANELS * 8])
        at = block * PANELS * 8 + tl.arange(0, PANELS * 8)
    tl.store(out + pair * out_row + at, y.to(out.dtype.element_ty), at < WIDTH)


def multiply_pairs(
    x: Tensor, address: Tensor, of: ExpertShape, out: Tensor, bias: PairBias | None = None, *, up: bool,
    in_pieces: bool = False, kernel_pairs: int = 0,
) -> None:  # fmt: skip
    """Multiply with one matrix of each pair's expert; pairs of address 0 are skipped, and their rows not written.

    up: out bfloat16 [T * k, width] = activation(gate x, up x) of x bfloat16 [T, hidden]. Else: out float32
    [T * k, hidden] = down x of x bfloat16 [T * k, width]. address int64 [T, k]; contiguous columns. kernel_pairs: use
    the tile for so many pairs, if there are fewer.
    """
    packed, columns = of.matrix(up)
    pairs = address.numel()
    tile = _tile(packed, "down" if not up else "up of few" if max(pairs, kernel_pairs) <= _FEW else "up")
    _pair[(pairs, triton.cdiv(packed.panels, tile.panels))](
        x, address, *of_pairs(bias), out, x.stride(0), out.stride(0), **matrix_constants(of, up, address.shape[1]),
        IN_PIECES=in_pieces, **_constants(packed, columns, tile, x), num_warps=tile.warps,
    )  # fmt: skip


def matrix_constants(of: ExpertShape, up: bool, top_k: int) -> dict[str, object]:
    """Constants of a kernel that multiplies with one matrix of the experts: see `_pair`."""
    if up:
        return {"WIDTH": of.width, "SHARE": top_k, "ACTIVATION": int(of.activation), "LIMIT": of.limit}
    return {"WIDTH": of.hidden, "SHARE": 1, "ACTIVATION": None, "LIMIT": 0.0}


def of_pairs(bias: PairBias | None) -> tuple[Tensor | None, Tensor | None]:
    """The kernels' two bias arguments."""
    return (None, None) if bias is None else (bias.ids, bias.of)


def _tile(of: Layout, which: str) -> Tile:
    return _TILES[which if of.format is Format.BF16 else "decoded"]


def _constants(of: Layout, columns: int, tile: Tile, x: Tensor | None = None) -> dict[str, object]:
    """Constants of the kernel. x: the activations; None: aligned so that four can be loaded at once."""
    quads = columns % 4 == 0 and (x is None or (x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0))
    blocks = {"PANELS": tile.panels, "LINES": lines_of(of, tile.lines), "STAGES": tile.stages, "QUADS": quads}
    return constants(of, columns) | blocks


def variants() -> Iterator[Variant]:
    types = {"x": "*bf16", "address": "*i64"} | dict.fromkeys(("x_row", "out_row"), "i32")
    aligned = ("x", "address", "out", "x_row", "out_row")
    plain = (ExpertShape(2048, 768), ExpertShape(2880, 2880), ExpertShape(2048, 1408))
    cases = [(of, name) for of in plain for name in ("up of few", "up", "down")]
    cases += [(ExpertShape(2048, 768, form), "up") for form in examples()]
    mxfp4 = Form(Format.MXFP4, 32)
    gpt_oss = ExpertShape(2880, 2880, mxfp4, mxfp4, Activation.CLAMPED_SWIGLU, 7.0)
    biased = [(gpt_oss, "up"), (gpt_oss, "down"), (replace(gpt_oss, up_form=BF16_FORM), "up of few")]
    in_pieces = [(plain[0], "up of few"), (plain[0], "down"), (gpt_oss, "down")]
    every = [*((*case, False, False) for case in cases), *((*case, True, False) for case in biased)]
    for of, name, bias, cut in [*every, *((*case, False, True) for case in in_pieces)]:
        up = name != "down"
        which = matrix_constants(of, up, 8) | {"IN_PIECES": cut}
        which |= {} if bias else {"ids": None, "bias": None}
        out = {"out": "*bf16" if up else "*fp32"} | ({"ids": "*i32", "bias": "*fp32"} if bias else {})
        packed, columns = of.matrix(up)
        tile = _tile(packed, name)
        of_tile = _constants(packed, columns, tile)
        yield Variant(_pair, types | out, which | of_tile, warps=tile.warps, aligned=aligned)
