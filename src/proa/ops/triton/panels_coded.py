"""Products of packed weights with up to 16 rows on the tensor cores, with unscaled codes (quantised values): codes that
are exact in bfloat16 are multiplied directly, and each group's sums are scaled in float32. Belongs here: those
products. Never: many rows, for which scaling sums costs more than scaling weights (panels.py), decoding (formats.py).

Few rows are bound by decoding: for int4 in groups of 32, a value and its scale take 8 instructions in float32, but 4 if
two values are decoded at once and only sums are scaled (decision 037).
"""

from __future__ import annotations

import triton
import triton.language as tl

from proa.native.formats import Layout, facts
from proa.ops.triton import formats
from proa.ops.triton.panels import ROWS, whole_stages

MOST_ROWS = 16
_LINES = tl.constexpr(4)  # 32 columns of four bits: what four lanes hold of a tensor-core operand


def coded_columns(of: Layout) -> int | None:
    """Columns per stage, which lies within one group; None: these products do not support the format or its groups.

    Few rows of weights and many columns are best where sums are scaled seldom (H200, docs/lab).
    """
    values, scale = facts(of.format).unit_values, formats.names(of.format)["SCALE"]
    before = scale == "e4m3"  # nvfp4: a code times its scale has at most 6 bits, exact in bfloat16
    group = of.padded_columns if before or not of.group else of.group
    if facts(of.format).unit_words > 1 or values < 4:
        return None
    most = (128, 64, 32) if values == 8 and not before else (64, 32)
    return next((columns for columns in most if group % columns == 0), None)


@triton.jit
def _columns(LINES: tl.constexpr, VALUES: tl.constexpr, WHOLE_WORDS: tl.constexpr):
    """The order in which products take a stage's columns. A lane of a tensor-core operand has four neighbouring values,
    or eight if the compiler sees 8-bit loads behind the operand; the order makes them come from one word, so that no
    two lanes decode the same word."""
    k = tl.arange(0, LINES * VALUES)
    if WHOLE_WORDS or VALUES == 4:
        return k
    else:
        return k // 32 * 32 + k // 4 % 4 * 8 + k // 16 % 2 * 4 + k % 4


@triton.jit
def _pair(words, p: tl.constexpr, CODE: tl.constexpr):
    bits = formats.pair(words, p, CODE)
    return tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _codes(words, CODE: tl.constexpr, VALUES: tl.constexpr, WHOLE_WORDS: tl.constexpr):
    """All values of words [parts, 4, panels, rows] as unscaled bfloat16 [LINES * VALUES, panels * rows], in the order
    of `_columns`."""
    if VALUES == 4:
        all_ = tl.join(_pair(words, 0, CODE), _pair(words, 1, CODE))
    else:
        tl.static_assert(VALUES == 8)
        low = tl.join(_pair(words, 0, CODE), _pair(words, 1, CODE))
        all_ = tl.join(low, tl.join(_pair(words, 2, CODE), _pair(words, 3, CODE)))
    all_ *= tl.full([], formats.pair_factor(CODE), tl.bfloat16)
    if formats.pair_zero(CODE) != 0.0:
        all_ -= tl.full([], formats.pair_zero(CODE), tl.bfloat16)
    if VALUES == 4:
        permuted = tl.permute(all_, (0, 1, 5, 4, 2, 3))
    elif WHOLE_WORDS:
        permuted = tl.permute(all_, (0, 1, 6, 5, 4, 2, 3))
    else:
        permuted = tl.permute(all_, (0, 6, 1, 5, 4, 2, 3))
    return permuted


@triton.jit
def coded_products(
    address, first, x, exists, begin, end,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """panels.panel_products without rounding weights. A stage has `coded_columns` columns."""
    N: tl.constexpr = PANELS * ROWS
    BY_GROUP: tl.constexpr = formats.by_group(CODE, SCALE, GROUP, PANEL_LINES * VALUES)
    BEFORE: tl.constexpr = SCALE == "e4m3"
    panel = tl.minimum(first + tl.arange(0, PANELS), COUNT - 1).to(tl.int64)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    row = tl.arange(0, ROWS)[None, :]
    area = (words + panel * PANEL_WORDS + PANEL_LINES * ROWS)[:, None]
    line = tl.arange(0, LINES // _LINES)[:, None] * _LINES + tl.arange(0, _LINES)[None, :]
    at = (words + panel * PANEL_WORDS)[None, None, :, None] + line[:, :, None, None] * ROWS + row[None, None, :, :]
    column = _columns(LINES, VALUES, BEFORE)
    x_at = x[:, None] + column[None, :]
    total = tl.zeros([x.shape[0], N], tl.float32)
    for start in tl.range(begin, end, LINES, num_stages=STAGES):
        if PANEL_LINES % LINES == 0:
            part = tl.load(at + start * ROWS)
        else:
            part = tl.load(at + start * ROWS, (line < PANEL_LINES - start)[:, :, None, None], 0)
        if whole_stages(COLUMNS, PANEL_LINES, LINES, VALUES):
            value = tl.load(x_at + start * VALUES, exists[:, None], 0.0)
        else:
            value = tl.load(x_at + start * VALUES, exists[:, None] & (column < COLUMNS - start * VALUES)[None, :], 0.0)
        many = _codes(part, CODE, VALUES, BEFORE)
        if BEFORE:
            group = tl.minimum((start + line) * VALUES // GROUP, PANEL_LINES * VALUES // GROUP - 1)
            scale = formats.scale(area[None, None], group[:, :, None, None], row[None, None], CODE, SCALE)
            many = many * scale.to(tl.bfloat16)[:, :, None, None, None, :, :]
        weights = tl.reshape(many, [LINES * VALUES, N])
        if BY_GROUP and not BEFORE:
            group = start * VALUES // GROUP
            scale = formats.scale(area, group, row, CODE, SCALE)
            total += tl.dot(value, weights) * tl.reshape(tl.broadcast_to(scale, [PANELS, ROWS]), [1, N])
            if formats.has_minimum(CODE):
                minimum = formats.minimum(area, group, row, SCALE) * (1.0 / formats.pair_unit(CODE))
                total += tl.sum(value.to(tl.float32), 1)[:, None] * tl.reshape(minimum, [1, N])
        else:
            total = tl.dot(value, weights, total)
    total *= formats.pair_unit(CODE)
    if BY_GROUP and not BEFORE:
        return total
    else:
        scale = formats.factor(area, SCALE) if BEFORE else formats.scale(area, 0, row, CODE, SCALE)
        return total * tl.reshape(tl.broadcast_to(scale, [PANELS, ROWS]), [1, N])
