"""Routed experts for many tokens: (token, expert) pairs are sorted by expert into blocks of one expert each, which the
tensor cores multiply; an expert is read once per block. Never: residency; pairs of address 0 are skipped.

Sorting runs on the device, without atomics: within an expert, pairs are in ascending order. The grid has as many blocks
as the pairs could at most fill; programs beyond the last block return at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.native.formats import BF16_FORM, Form, Format
from proa.native.weights import Activation
from proa.ops.residency import ExpertShape, PairBias
from proa.ops.sizes import BLOCK_TOKENS, WIDE_BLOCK, most_blocks, order_entries
from proa.ops.triton.expert_tiles import HOPPER, Tile, tile_of
from proa.ops.triton.experts_few import matrix_constants, of_pairs
from proa.ops.triton.formats import examples
from proa.ops.triton.panels import ROWS, activated, bias_at, columns_of, constants, panel_products
from proa.ops.triton.panels_coded import coded_products
from proa.ops.triton.panels_first import panels_first
from proa.ops.triton.variant import Variant

_FEW_SCANNED, _SCANNED, _SCAN_WARPS = 1024, 8192, 8  # pairs scanned at once, in two kernels


@dataclass(frozen=True)
class Groups:
    """Pairs sorted by expert, in caller-owned int32 tensors: counts [E], blocks [1] (number of blocks), order
    [most_blocks * block_tokens].

    Entry i of block b in order is a pair or -1 (padding); a block's first entry is a pair. Blocks from `blocks` on are
    not written.
    """

    counts: Tensor
    blocks: Tensor
    order: Tensor


def groups(pairs: int, experts: int, device: torch.device) -> Groups:
    """Allocate room for up to `pairs` pairs, in blocks of any size."""
    sizes = (experts, 1, order_entries(pairs, experts))
    return Groups(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, SCAN: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros([SCAN], tl.int32)
    for first in range(0, pairs, SCAN):
        pair = first + tl.arange(0, SCAN)
        found += (tl.load(ids + pair, pair < pairs, -1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "block"])
def _place(
    ids, counts, blocks, order, pairs, block,
    EXPERTS: tl.constexpr, MOST: tl.constexpr, SCAN: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one expert (a program each), of `block` pairs, up to MOST blocks."""
    expert = tl.program_id(0)
    other = tl.arange(0, ALL)
    filled = tl.cdiv(tl.load(counts + other, other < EXPERTS, 0), block)
    before = tl.sum(tl.where(other < expert, filled, 0), 0)
    if expert == 0:
        tl.store(blocks, tl.sum(filled, 0))
    own = tl.load(counts + expert)
    start = order + before * block
    rest = own + tl.arange(0, MOST)
    tl.store(start + rest, tl.full([MOST], -1, tl.int32), rest < tl.cdiv(own, block) * block)
    placed = own * 0
    for first in range(0, pairs, SCAN):
        pair = first + tl.arange(0, SCAN)
        mine = (tl.load(ids + pair, pair < pairs, -1) == expert).to(tl.int32)
        tl.store(start + placed + tl.cumsum(mine, 0) - 1, pair, mine != 0)
        placed += tl.sum(mine, 0)


@triton.jit
def _products(
    x, expert, ids, bias, pairs, out, x_row, out_row, part,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, TOKENS: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr, FIRST: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Products of PANELS panels of an expert with the first TOKENS pairs of a block, stored to `out`."""
    pair = tl.load(pairs + tl.arange(0, TOKENS)).to(tl.int64)
    if bias is not None:  # loaded while the weights are in flight
        panel = tl.arange(0, PANELS)
        if FIRST and ACTIVATION is not None:  # in the row order of panels_first
            panel = panel % (PANELS // 2) * 2 + panel // (PANELS // 2)
        places, exist = bias_at(bias, ids, tl.load(pairs), part * PANELS + panel, COUNT)
        biases = tl.reshape(tl.load(places, exist, 0.0), [PANELS * ROWS])
    exists = pair >= 0
    rows = x + (tl.maximum(pair, 0) // SHARE) * x_row
    if FIRST:
        sums = panels_first(
            expert, part * PANELS, rows, exists, CODE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, PANELS, LINES,
            STAGES, VALUES, ACTIVATION is not None,
        )  # fmt: skip
    elif CODED:
        sums = coded_products(
            expert, part * PANELS, rows, exists, 0, PANEL_LINES,
            CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES,
        )  # fmt: skip
    else:
        sums = panel_products(
            expert, part * PANELS, rows, exists, 0, PANEL_LINES,
            CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES,
        )  # fmt: skip
    if bias is not None:
        sums += biases[:, None] if FIRST else biases[None, :]
    if ACTIVATION is None:
        y = tl.trans(sums) if FIRST else sums
        at = part * PANELS * ROWS + tl.arange(0, PANELS * ROWS)
    else:
        if FIRST:
            gate, up = tl.split(tl.permute(tl.reshape(sums, [2, PANELS * 8, TOKENS]), (1, 2, 0)))
            y = tl.trans(activated(gate, up, ACTIVATION, LIMIT).to(out.dtype.element_ty))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(sums, [TOKENS, PANELS // 2, 2, ROWS]), (0, 1, 3, 2)))
            y = tl.reshape(activated(gate, up, ACTIVATION, LIMIT), [TOKENS, PANELS * 8])
        at = part * PANELS * 8 + tl.arange(0, PANELS * 8)
    inside = exists[:, None] & (at < WIDTH)[None, :]
    tl.store(out + pair[:, None] * out_row + at[None, :], y.to(out.dtype.element_ty), inside)


@triton.jit
def fits(pairs, tokens: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """True if a block has at most `tokens` pairs, and its kernel a product of so many: not of fewer than LEAST."""
    if tokens < LEAST or tokens == BLOCK:
        return False
    else:
        return tl.load(pairs + tokens) < 0


@triton.jit
def _block(
    x, address, ids, bias, order, blocks, out, x_row, out_row,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr, FIRST: tl.constexpr, CODED: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Products of one block of pairs, by the smallest product in which they fit. Parts of a block are neighbours in the
    grid and share its rows in L2; blocks of one expert follow each other and share its panels. For the arguments see
    experts_few._pair."""
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
            x, expert, ids, bias, pairs, out, x_row, out_row, part, WIDTH, SHARE, ACTIVATION, LIMIT, QUARTER,
            CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES, FIRST, CODED,
        )  # fmt: skip
    elif fits(pairs, HALF, BLOCK, LEAST):
        _products(
            x, expert, ids, bias, pairs, out, x_row, out_row, part, WIDTH, SHARE, ACTIVATION, LIMIT, HALF,
            CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES, FIRST, CODED,
        )  # fmt: skip
    else:
        _products(
            x, expert, ids, bias, pairs, out, x_row, out_row, part, WIDTH, SHARE, ACTIVATION, LIMIT, BLOCK,
            CODE, SCALE, COLUMNS, PANEL_LINES, PANEL_WORDS, COUNT, GROUP, PANELS, LINES, STAGES, VALUES, FIRST, CODED,
        )  # fmt: skip


def group(ids: Tensor, experts: int, block_tokens: int, to: Groups) -> None:
    """Sort the pairs of ids int32 [T, k] by expert into blocks of at most WIDE_BLOCK; ids of -1 are skipped."""
    pairs = ids.numel()
    if len(to.counts) != experts or len(to.order) < most_blocks(pairs, experts, block_tokens) * block_tokens:
        raise ValueError(f"the workspace has no room for {pairs} pairs of {experts} experts")
    scan = _FEW_SCANNED if pairs <= _FEW_SCANNED else _SCANNED  # two kernels serve all batches
    _count[(experts,)](ids, to.counts, pairs, SCAN=scan, num_warps=_SCAN_WARPS)
    _place[(experts,)](
        ids, to.counts, to.blocks, to.order, pairs, block_tokens, EXPERTS=experts, MOST=WIDE_BLOCK,
        ALL=triton.next_power_of_2(experts), SCAN=scan, num_warps=_SCAN_WARPS,
    )  # fmt: skip


def multiply_blocks(
    x: Tensor, address: Tensor, by: Groups, tile: Tile, of: ExpertShape, out: Tensor,
    bias: PairBias | None = None, *, up: bool,
) -> None:  # fmt: skip
    """experts_few.multiply_pairs for pairs grouped into blocks of tile.tokens. tile: for that matrix."""
    packed, _ = of.matrix(up)
    grid = (triton.cdiv(packed.panels, tile.panels), most_blocks(address.numel(), len(by.counts), tile.tokens))
    _block[grid](
        x, address, *of_pairs(bias), by.order, by.blocks, out, x.stride(0), out.stride(0), BLOCK=tile.tokens,
        **matrix_constants(of, up, address.shape[1]), **_constants(of, up, tile), num_warps=tile.warps,
    )  # fmt: skip


def _constants(of: ExpertShape, up: bool, tile: Tile) -> dict[str, object]:
    packed, columns = of.matrix(up)
    blocks = {"PANELS": tile.panels, "LINES": columns_of(packed, tile.lines), "STAGES": tile.stages}
    return constants(packed, columns) | blocks | {"FIRST": tile.first, "CODED": tile.coded, "LEAST": tile.least}


def variants() -> Iterator[Variant]:
    for scan in (_FEW_SCANNED, _SCANNED):
        yield Variant(_count, {"ids": "*i32", "counts": "*i32", "pairs": "i32"}, {"SCAN": scan}, warps=_SCAN_WARPS)
        types = dict.fromkeys(("ids", "counts", "blocks", "order"), "*i32") | {"pairs": "i32", "block": "i32"}
        which: dict[str, object] = {"EXPERTS": 128, "MOST": WIDE_BLOCK, "ALL": 128, "SCAN": scan}
        yield Variant(_place, types, which, warps=_SCAN_WARPS)
    types = {"x": "*bf16", "address": "*i64", "order": "*i32", "blocks": "*i32"}
    types |= dict.fromkeys(("x_row", "out_row"), "i32")
    aligned = ("x", "address", "order", "blocks", "out", "x_row", "out_row")
    cases = [
        (of, up, size)
        for of in (ExpertShape(2048, 768), ExpertShape(2880, 2880))
        for size in (*BLOCK_TOKENS, WIDE_BLOCK)
        for up in (True, False)
    ]
    cases += [(ExpertShape(2048, 768, down_form=form), False, size) for form in examples() for size in (16, 128)]
    mxfp4 = Form(Format.MXFP4, 32)
    gpt_oss = ExpertShape(2880, 2880, mxfp4, mxfp4, Activation.CLAMPED_SWIGLU, 7.0)
    plain = replace(gpt_oss, up_form=BF16_FORM, down_form=BF16_FORM)
    biased = [(of, up, size) for of in (gpt_oss, plain) for size in (16, 128) for up in (True, False)]
    for of, up, size, bias in [*((*case, False) for case in cases), *((*case, True) for case in biased)]:
        which = matrix_constants(of, up, 8) | {"BLOCK": size}
        which |= {} if bias else {"ids": None, "bias": None}
        out = {"out": "*bf16" if up else "*fp32"} | ({"ids": "*i32", "bias": "*fp32"} if bias else {})
        packed = of.matrix(up)[0]
        everywhere, hopper = tile_of(packed, size, 0), tile_of(packed, size, HOPPER[0])
        made = Variant(_block, types | out, which | _constants(of, up, everywhere), everywhere.warps, aligned=aligned)
        if size == WIDE_BLOCK:
            yield replace(made, least=HOPPER[0], newest=HOPPER[-1])
        else:
            yield made
        if hopper != everywhere:
            yield replace(
                made, constants=which | _constants(of, up, hopper), warps=hopper.warps,
                least=HOPPER[0], newest=HOPPER[-1],
            )  # fmt: skip
