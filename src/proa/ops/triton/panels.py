"""Device functions that multiply with packed weights (csrc/src/layout.h), in the layout of the CPU's kernels, in VRAM
or mapped host memory. Belongs here: addressing of panels, products with them. Never: decoding (formats.py), the use of
the products.

A panel consists of lines of 64 bytes; a line is one 32-bit word of each of 16 rows. Words are loaded 16 bytes per
thread and decoded in registers; scales are loaded in vectors of 16 rows, mostly from L1.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function

from proa.native.formats import PANEL_ROWS, Format, Layout, facts
from proa.ops.triton import formats

ROWS = tl.constexpr(PANEL_ROWS)
WIDE = tl.constexpr(64)  # rows from which on Hopper's wgmma, which reads weights from shared memory, applies


def constants(of: Layout, columns: int) -> dict[str, object]:
    """Constants of a kernel that multiplies with packed weights; columns: those in use, without padding."""
    return {
        "COLUMNS": columns, "PANEL_LINES": of.padded_columns // facts(of.format).unit_values,
        "PANEL_WORDS": of.panel_bytes // 4, "COUNT": of.panels, "GROUP": of.group or of.padded_columns,
        "VALUES": facts(of.format).unit_values, **formats.names(of.format),
    }  # fmt: skip


def lines_of(of: Layout, most: int) -> int:
    """Lines per stage with as many bytes as `most` lines of one word, and few lines beyond the panel's end."""
    lines = most // (4 if facts(of.format).unit_words > 1 else 1)
    panel_lines = of.padded_columns // facts(of.format).unit_values
    while of.format is not Format.BF16 and lines > 16 and panel_lines % lines:
        lines //= 2
    return lines


def columns_of(of: Layout, bf16_lines: int) -> int:
    """Lines per stage with as many columns as `bf16_lines` lines of bfloat16, at least 4."""
    return max(4, bf16_lines * facts(Format.BF16).unit_values // facts(of.format).unit_values)


@triton.jit
def _words(at, mask, CODE: tl.constexpr):
    """Load three words of each line and row: for six-bit formats two words of low bits and one of high bits; for others
    the same word three times."""
    low = tl.load(at) if mask is None else tl.load(at, mask, 0)
    more, high = low, low
    if formats.line_words(CODE) == 3:
        if mask is None:
            more, high = tl.load(at + ROWS), tl.load(at + 2 * ROWS)
        else:
            more, high = tl.load(at + ROWS, mask, 0), tl.load(at + 2 * ROWS, mask, 0)
    return low, more, high


@triton.jit
def _value(words, i: tl.constexpr, CODE: tl.constexpr):
    low, more, high = words
    if formats.line_words(CODE) == 3:
        return formats.six_bits(low if i < 8 else more, high, i, CODE)
    else:
        return formats.value(low, i, CODE)


@triton.jit
def _row_value(x, column, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    value = tl.load(x + column) if WHOLE else tl.load(x + column, column < COLUMNS, 0.0)
    return value.to(tl.float32)


@triton.jit
def _quad(x, at, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Load four neighbouring bfloat16, all or none within bounds, as a 64-bit word."""
    quads = x.to(tl.pointer_type(tl.int64)) + at
    return tl.load(quads) if WHOLE else tl.load(quads, at < COLUMNS // 4, 0)


@triton.jit
def _two(x, at, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Load two neighbouring bfloat16 as a 32-bit word: asynchronous copies need at least four bytes per thread."""
    pairs = x.to(tl.pointer_type(tl.int32)) + at
    return tl.load(pairs) if WHOLE else tl.load(pairs, at < COLUMNS // 2, 0)


@triton.jit
def _of_word(word, i: tl.constexpr):
    pair = (word >> 32 if i >= 2 else word).to(tl.int32)
    return (pair & -65536 if i % 2 else pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _add_lines(
    products, words, x, column,
    CODE: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, VALUES: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Unscaled products of words [panels, lines, 16] with x, summed per word; and the sums of x, for minimums. column:
    first column of each line."""
    x_sum = tl.zeros([words[0].shape[1]], tl.float32)
    for i in tl.static_range(VALUES):
        if QUADS and VALUES % 4 == 0:
            if i % 4 == 0:
                quad = _quad(x, (column + i) // 4, COLUMNS, WHOLE)
            value = _of_word(quad, i % 4)
        elif QUADS and VALUES == 2:
            if i == 0:
                two = _two(x, column // 2, COLUMNS, WHOLE)
            value = _of_word(two, i)
        else:
            value = _row_value(x, column + i, COLUMNS, WHOLE)
        products += _value(words, i, CODE) * value[None, :, None]
        x_sum += value
    return products, x_sum


@triton.jit
def panel_sums(
    address, first, x, begin, end,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Products of PANELS panels from `first` on with one row of activations: float32 [PANELS, ROWS]. Weights are not
    rounded: scales are applied to the sum of a word's products.

    Only lines [begin, end) count, where `end` is the last line or both are multiples of LINES. LINES is less than the
    threads of a program, so that each thread loads its own elements of x and no barrier is needed. Panels beyond COUNT
    repeat the last one. QUADS: x can be loaded four elements at a time.
    """
    STEP: tl.constexpr = ROWS * formats.line_words(CODE)
    BY_GROUP: tl.constexpr = formats.by_group(CODE, SCALE, GROUP, PANEL_LINES * VALUES)
    WHOLE: tl.constexpr = whole_stages(COLUMNS, PANEL_LINES, LINES, VALUES)
    GROUPS: tl.constexpr = _groups_of(LINES, GROUP // VALUES)
    panel = tl.minimum(first + tl.arange(0, PANELS), COUNT - 1).to(tl.int64)
    line, row = tl.arange(0, LINES), tl.arange(0, ROWS)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    at = words + panel[:, None, None] * PANEL_WORDS + line[None, :, None] * STEP + row[None, None, :]
    area = words + panel * PANEL_WORDS + PANEL_LINES * STEP
    total = tl.zeros([PANELS, LINES, ROWS], tl.float32)
    other = tl.zeros([PANELS, LINES, ROWS], tl.float32)  # fp16 only: sums of the second row of each word
    for start in tl.range(begin, end, LINES, num_stages=STAGES):
        if PANEL_LINES % LINES == 0:
            part = _words(at + start * STEP, None, CODE)
        else:
            part = _words(at + start * STEP, (line < PANEL_LINES - start)[None, :, None], CODE)
        if CODE == "fp16":
            column = (start + line)[:, None] * 2 + (row // 8)[None, :]  # a word is two rows of one column
            value = _row_value(x, column, COLUMNS, WHOLE)[None, :, :]
            total += formats.half(part[0], 0) * value
            other += formats.half(part[0], 1) * value
        else:
            products = tl.zeros([PANELS, LINES, ROWS], tl.float32) if BY_GROUP else total
            products, x_sum = _add_lines(
                products, part, x, (start + line) * VALUES, CODE, COLUMNS, WHOLE, VALUES, QUADS
            )
            if CODE == "e4m3":
                products = tl.where(formats.has_nan(part[0]), float("nan"), products)
            if BY_GROUP:
                group = (start + tl.arange(0, GROUPS) * (LINES // GROUPS)) * VALUES // GROUP
                group = tl.minimum(group, PANEL_LINES * VALUES // GROUP - 1)[None, :, None]
                scale = formats.scale(area[:, None, None], group, row[None, None, :], CODE, SCALE)
                total += products * formats.unit_of(CODE) * _spread(scale, LINES)
                if formats.has_minimum(CODE):
                    minimum = formats.minimum(area[:, None, None], group, row[None, None, :], SCALE)
                    total += _spread(minimum, LINES) * x_sum[None, :, None]
            else:
                total = products
    sums = tl.sum(total, 1)
    if CODE == "fp16":
        return tl.reshape(tl.join(_columns(sums), _columns(tl.sum(other, 1))), [PANELS, ROWS])
    else:
        return sums * _panel_scale(area[:, None], row[None, :], CODE, SCALE, BY_GROUP)


@triton.jit
def bias_at(bias, ids, pair, panel, COUNT: tl.constexpr):
    """Addresses of the biases of the pair's expert for panels [..]: [.., ROWS]; and a mask of panels that exist.

    bias float32 [experts, COUNT * ROWS]; ids: expert of each pair.
    """
    expert = tl.load(ids + pair).to(tl.int64)
    return bias + (expert * COUNT + panel)[:, None] * ROWS + tl.arange(0, ROWS)[None, :], (panel < COUNT)[:, None]


@constexpr_function
def whole_stages(columns, panel_lines, lines, values):
    """True if no stage reads columns beyond the last one of x; a panel may have more, padded to whole groups."""
    return -(-panel_lines // lines) * lines * values == columns


@constexpr_function
def _groups_of(lines, group_lines):
    """Number of parts, each within one group, into which a stage's lines are split."""
    return max(1, lines // group_lines) if lines % group_lines == 0 or group_lines % lines == 0 else lines


@triton.jit
def _spread(scales, LINES: tl.constexpr):
    """Broadcast scales of groups [panels, groups, rows] to their lines [panels, lines, rows]."""
    groups: tl.constexpr = scales.shape[1]
    shape: tl.constexpr = (scales.shape[0], groups, LINES // groups, scales.shape[2])
    return tl.reshape(tl.broadcast_to(scales[:, :, None, :], shape), [scales.shape[0], LINES, scales.shape[2]])


@triton.jit
def _columns(sums):
    """fp16 only: add the sums of words of even columns to those of odd columns."""
    return tl.sum(tl.reshape(sums, [sums.shape[0], 2, 8]), 1)


@triton.jit
def _panel_scale(area, row, CODE: tl.constexpr, SCALE: tl.constexpr, BY_GROUP: tl.constexpr):
    """Scale of sums over whole rows: the part that was not applied per group."""
    if BY_GROUP:
        return formats.factor(area, SCALE) if SCALE == "e4m3" else 1.0
    elif SCALE == "none":
        return 1.0
    else:
        scale = formats.scale(area, 0, row, CODE, SCALE) * formats.unit_of(CODE)
        return scale * formats.factor(area, SCALE) if SCALE == "e4m3" else scale


@triton.jit
def _weight(words, scale, minimum, i: tl.constexpr, CODE: tl.constexpr):
    """Value i of each word times its scale, rounded to bfloat16 once; without a scale it is exact."""
    value = _value(words, i, CODE)
    if scale is not None:
        value = value * formats.unit_of(CODE) * scale
    if minimum is not None:
        value += minimum
    return value.to(tl.bfloat16)


@triton.jit
def _four(words, scale, minimum, i: tl.constexpr, step: tl.constexpr, CODE: tl.constexpr):
    """Values i, i + step, i + 2 step, i + 3 step, joined in two new dimensions."""
    even = tl.join(
        _weight(words, scale, minimum, i, CODE), _weight(words, scale, minimum, i + 2 * step, CODE)
    )  # fmt: skip
    odd = tl.join(
        _weight(words, scale, minimum, i + step, CODE), _weight(words, scale, minimum, i + 3 * step, CODE)
    )  # fmt: skip
    return tl.join(even, odd)


@triton.jit
def _eight(words, scale, minimum, i: tl.constexpr, step: tl.constexpr, CODE: tl.constexpr):
    even = _four(words, scale, minimum, i, 2 * step, CODE)
    return tl.join(even, _four(words, scale, minimum, i + step, 2 * step, CODE))


@triton.jit
def _weights(words, scale, minimum, CODE: tl.constexpr, VALUES: tl.constexpr):
    """bfloat16 [..., VALUES] of words [...]."""
    if VALUES == 4:
        all_ = _four(words, scale, minimum, 0, 1, CODE)
    elif VALUES == 8:
        all_ = _eight(words, scale, minimum, 0, 1, CODE)
    else:
        tl.static_assert(VALUES == 16)
        even = _eight(words, scale, minimum, 0, 2, CODE)
        all_ = tl.join(even, _eight(words, scale, minimum, 1, 2, CODE))
    return tl.reshape(all_, words[0].shape + [VALUES])  # noqa: RUF005 - Triton has no unpacking


@triton.jit
def _scaled(
    words, area, group, row,
    CODE: tl.constexpr, SCALE: tl.constexpr, VALUES: tl.constexpr, BY_GROUP: tl.constexpr,
):  # fmt: skip
    """Values of words as bfloat16 [..., VALUES], multiplied by the scales of their groups."""
    scale, minimum = None, None
    if BY_GROUP:
        scale = formats.scale(area, group, row, CODE, SCALE)
        if formats.has_minimum(CODE):
            minimum = formats.minimum(area, group, row, SCALE)
    if CODE == "e4m3":
        one = 1.0 / formats.unit_of(CODE)
        scale = tl.where(formats.has_nan(words[0]), float("nan"), one if scale is None else scale)
    return _weights(words, scale, minimum, CODE, VALUES)


@triton.jit
def _plain(words, AS_WIDE: tl.constexpr, CODE: tl.constexpr):
    """Words of unscaled formats as bfloat16, transposed: lines and columns first, panels and rows last."""
    if CODE == "bf16":
        transposed = tl.permute(words, (0, 2, 1, 3) if AS_WIDE else (2, 0, 1, 3, 4))
        quads: tl.constexpr = transposed.shape[0]
        lines = tl.reshape(transposed, [quads * 4, words.numel // (quads * 4)])
        pair = tl.join(lines.to(tl.int16), (lines >> 16).to(tl.int16))
        return tl.permute(pair, (0, 2, 1)).to(tl.bfloat16, bitcast=True)
    else:
        # fp16: a word is two rows of one column; the upper eight words of a line are its odd columns.
        rows = tl.join(formats.half(words, 0), formats.half(words, 1)).to(tl.bfloat16)
        shape: tl.constexpr = words.shape
        if AS_WIDE:
            rows = tl.reshape(rows, [shape[0], shape[1], 4, 2, ROWS])
            return tl.permute(rows, (0, 2, 3, 1, 4))
        else:
            rows = tl.reshape(rows, [2, 2, shape[2], shape[3], 2, ROWS])
            return tl.permute(rows, (2, 0, 1, 4, 3, 5))


@triton.jit
def _fours(LINES: tl.constexpr, AS_WIDE: tl.constexpr):
    """The first of every four lines, which share their scales unless groups are smaller."""
    first = tl.arange(0, LINES // 4) * 4
    return first[:, None, None, None] if AS_WIDE else first[None, None, :, None, None]


@triton.jit
def panel_products(
    address, first, x, exists, begin, end,
    CODE: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr,
    PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Products of PANELS panels with rows at addresses x [B] of activations, on the tensor cores: float32
    [B, PANELS * ROWS]. For lines and panels see panel_sums.

    Rows where `exists` is false count as zeros. Weights times scales are rounded to bfloat16 once.
    """
    STEP: tl.constexpr = ROWS * formats.line_words(CODE)
    BY_GROUP: tl.constexpr = formats.by_group(CODE, SCALE, GROUP, PANEL_LINES * VALUES)
    AS_WIDE: tl.constexpr = x.shape[0] >= WIDE
    panel = tl.minimum(first + tl.arange(0, PANELS), COUNT - 1).to(tl.int64)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    row_area = (words + panel * PANEL_WORDS + PANEL_LINES * STEP)[:, None]
    if AS_WIDE:
        # A thread copies four lines of four rows, which it can transpose before storing wgmma's operand.
        line = (tl.arange(0, LINES // 4)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
        panel = panel[None, :, None, None]
        row = tl.arange(0, ROWS)[None, None, None, :]
    else:
        # In each group of four lines, the second and third are swapped in shared memory: the lanes of a warp, which
        # read every other line, then have two-way bank conflicts instead of four-way ones.
        pair = tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
        line = (tl.arange(0, LINES // 4)[None, None, :] * 4 + pair[:, :, None])[:, :, :, None, None]
        panel = panel[None, None, None, :, None]
        row = tl.arange(0, ROWS)[None, None, None, None, :]
    scaled_line = line if GROUP % (4 * VALUES) else _fours(LINES, AS_WIDE)
    at = words + panel * PANEL_WORDS + line * STEP + row
    area = words + panel * PANEL_WORDS + PANEL_LINES * STEP
    column = tl.arange(0, LINES * VALUES)
    x_at = x[:, None] + column[None, :]
    total = tl.zeros([x.shape[0], PANELS * ROWS], tl.float32)
    for start in tl.range(begin, end, LINES, num_stages=STAGES):
        if PANEL_LINES % LINES == 0:
            part = _words(at + start * STEP, None, CODE)
        else:
            part = _words(at + start * STEP, line < PANEL_LINES - start, CODE)
        if whole_stages(COLUMNS, PANEL_LINES, LINES, VALUES):
            value = tl.load(x_at + start * VALUES, exists[:, None], 0.0)
        else:
            value = tl.load(x_at + start * VALUES, exists[:, None] & (column < COLUMNS - start * VALUES)[None, :], 0.0)
        group = tl.minimum((start + scaled_line) * VALUES // GROUP, PANEL_LINES * VALUES // GROUP - 1)
        if CODE == "bf16" or CODE == "fp16":
            many = _plain(part[0], AS_WIDE, CODE)
        else:
            many = _scaled(part, area, group, row, CODE, SCALE, VALUES, BY_GROUP)
            many = tl.permute(many, (0, 2, 4, 1, 3) if AS_WIDE else (2, 0, 1, 5, 3, 4))
        weights = tl.reshape(many, [LINES * VALUES, PANELS * ROWS])
        total = tl.dot(value, weights, total)
    scale = _panel_scale(row_area, tl.arange(0, ROWS)[None, :], CODE, SCALE, BY_GROUP)
    if SCALE == "none" or (BY_GROUP and SCALE != "e4m3"):
        return total
    else:
        return total * tl.reshape(tl.broadcast_to(scale, [PANELS, ROWS]), [1, PANELS * ROWS])


@triton.jit
def panel_rows(
    address, panel, start,
    CODE: tl.constexpr, SCALE: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr,
    GROUP: tl.constexpr, LINES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Dequantise lines of one panel from `start` on to rows: bfloat16 [ROWS, LINES * VALUES], rounded once."""
    STEP: tl.constexpr = ROWS * formats.line_words(CODE)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + panel * PANEL_WORDS
    line, row = start + tl.arange(0, LINES)[:, None], tl.arange(0, ROWS)[None, :]
    part = _words(words + line * STEP + row, line < PANEL_LINES, CODE)
    if CODE == "bf16":
        both = tl.join(part[0].to(tl.int16), (part[0] >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
        return tl.reshape(tl.permute(both, (1, 0, 2)), [ROWS, LINES * VALUES])
    elif CODE == "fp16":  # a word is two rows of one column; the upper eight words of a line are its odd columns
        both = tl.join(formats.half(part[0], 0), formats.half(part[0], 1)).to(tl.bfloat16)
        return tl.reshape(tl.permute(tl.reshape(both, [LINES, 2, ROWS]), (2, 0, 1)), [ROWS, LINES * VALUES])
    else:
        area = words + PANEL_LINES * STEP
        group = tl.minimum(line * VALUES // GROUP, PANEL_LINES * VALUES // GROUP - 1)
        scale = formats.scale(area, group, row, CODE, SCALE)
        if SCALE == "e4m3":
            scale *= formats.factor(area, SCALE)
        if CODE == "e4m3":
            scale = tl.where(formats.has_nan(part[0]), float("nan"), scale)
        minimum = formats.minimum(area, group, row, SCALE) if formats.has_minimum(CODE) else None
        values = _weights(part, scale, minimum, CODE, VALUES)
        return tl.reshape(tl.permute(values, (1, 0, 2)), [ROWS, LINES * VALUES])


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Apply an activation (values of native Activation) in float32. NaN propagates."""
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    else:
        tl.static_assert(ACTIVATION == 1)
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
