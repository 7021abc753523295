"""Which blocks and tiles the kernels of grouped experts use, by number of pairs, format and GPU. Never: kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from proa.native.formats import Format, Layout
from proa.ops.residency import ExpertShape
from proa.ops.sizes import WIDE_BLOCK
from proa.ops.triton.panels_coded import MOST_ROWS, coded_columns

HOPPER = range(90, 100)  # compute capabilities whose tensor cores read weights from shared memory (wgmma)


@dataclass(frozen=True)
class Tile:
    """A program's part of the products: `tokens` pairs of a block and `panels` panels, `lines` lines at a time (of
    bfloat16; other formats use as many lines as hold the same columns), in `stages` stages.

    least: fewest tokens of a product: the block's size, its half or its quarter. Fewer pairs are padded to it.
    first: weights are the first operand (panels_first.py). coded: quantised values are multiplied directly
    (panels_coded.py). Shared memory stays below sm_120's 99 KiB, but for WIDE_BLOCK.
    """

    tokens: int
    panels: int
    lines: int
    stages: int
    warps: int
    least: int
    first: bool = False
    coded: bool = False


# Small blocks are bound by reading weights: two stages of 16 KiB, or three of 8, in flight. Large ones fill the tensor
# cores' tiles. A row has the same bits in all products of 64 and more tokens, and of 32 and more if weights are the
# first operand.
_PLAIN = {
    16: Tile(16, 4, 64, 3, 4, 16),
    32: Tile(32, 4, 32, 4, 4, 32),
    64: Tile(64, 8, 32, 3, 4, 32, first=True),
    128: Tile(128, 8, 32, 3, 4, 32, first=True),
    WIDE_BLOCK: Tile(WIDE_BLOCK, 8, 32, 4, 8, 64, first=True),  # 176 KiB of shared memory
}
_DECODED = {
    16: Tile(16, 4, 64, 3, 4, 16),
    32: Tile(32, 4, 32, 4, 4, 32),
    64: Tile(64, 8, 32, 3, 4, 64),
    128: Tile(128, 8, 32, 3, 8, 64),
}
# 4 warps are 14 to 35 % faster on an H200. On sm_80 to sm_120 they would spill 50 to 250 bytes of registers.
_DECODED_HOPPER = _DECODED | {128: Tile(128, 8, 32, 3, 4, 64)}
_CODED = {columns: Tile(16, 16 if columns == 32 else 8, columns // 2, 3 if columns == 128 else 4, 4, 16, coded=True)
          for columns in (32, 64, 128)}  # fmt: skip


def tile_of(of: Layout, block_tokens: int, capability: int) -> Tile:
    """The tile for blocks of this size on a GPU of this compute capability (90: 9.0; 0: any GPU). Formats other than
    bfloat16 are decoded first and have no WIDE_BLOCK."""
    if of.format is Format.BF16:
        return _PLAIN[block_tokens]
    columns = coded_columns(of) if block_tokens <= MOST_ROWS else None
    if columns is not None:
        return _CODED[columns]
    return (_DECODED_HOPPER if capability in HOPPER else _DECODED)[block_tokens]


# Block sizes by the mean number of pairs per expert, with uniform random routing: (most pairs, tokens). Decoding takes
# as long for blocks of 32 as for those of 64; values that are multiplied directly are decoded so fast that two blocks
# of 16 take less time than one of 32.
_PLAIN_BLOCKS = ((10, 16), (22, 32), (50, 64), (math.inf, 128))
_CODED_BLOCKS = ((16, 16), (22, 32), (50, 64), (math.inf, 128))
_PLAIN_HOPPER_BLOCKS = ((10, 16), (22, 32), (100, 128), (math.inf, WIDE_BLOCK))
_DECODED_HOPPER_BLOCKS = ((10, 16), (80, 64), (math.inf, 128))
_CODED_HOPPER_BLOCKS = ((18, 16), (80, 64), (math.inf, 128))


def block_tokens(pairs: int, of: ExpertShape, experts: int, capability: int) -> int:
    """Block size of a call with `pairs` pairs of `experts` experts. capability: see tile_of."""
    plain = [packed.format is Format.BF16 for packed in (of.up, of.down)]
    coded = not any(plain) and all(coded_columns(packed) is not None for packed in (of.up, of.down))
    blocks: tuple[tuple[float, int], ...]
    if capability not in HOPPER:
        blocks = _CODED_BLOCKS if coded else _PLAIN_BLOCKS
    elif coded:
        blocks = _CODED_HOPPER_BLOCKS
    else:
        blocks = _PLAIN_HOPPER_BLOCKS if all(plain) else _DECODED_HOPPER_BLOCKS
    return next(tokens for most, tokens in blocks if pairs <= most * experts)
