"""Products of packed e4m3 weights with e4m3 activations on the tensor cores, float32 sums. Lossy: the activations are
rounded (fp8_rows.py); the weights are the checkpoint's quantised values. Never: rounding, the use of the products.

Weights are the first operand: a word of a panel is four columns of one row, exactly what a thread holds of it. The
order of columns does not matter to a sum, as long as the activations have the same order. The tensor cores accumulate
only 128 columns at a time: Hopper's keep 14 bits of such sums (arXiv 2412.19437, 3.3.2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from proa.native.formats import Layout
from proa.ops.sizes import E4M3_COLUMNS as COLUMNS
from proa.ops.triton.panels import ROWS, constants


def fp8_constants(of: Layout) -> dict[str, object]:
    """Constants of a kernel that calls `fp8_products`."""
    known = constants(of, of.columns)
    grouped = of.group > 0
    names = ("SCALE", "PANEL_LINES", "PANEL_WORDS", "COUNT")
    return {name: known[name] for name in names} | {"BY_GROUP": grouped, "LINES": COLUMNS // 4}


@triton.jit
def _row_scales(area, group, SCALE: tl.constexpr, PANELS: tl.constexpr, PAIRED: tl.constexpr):
    """Load the weights' scales of a group: float32 [PANELS * ROWS]."""
    at = area.to(tl.pointer_type(tl.float32))[:, None]
    if SCALE == "f32_panel":
        return in_order(tl.broadcast_to(tl.load(at + group), [PANELS, ROWS]), PANELS, PAIRED)
    else:
        tl.static_assert(SCALE == "f32")
        return in_order(tl.load(at + tl.arange(0, ROWS)[None, :]), PANELS, PAIRED)


@triton.jit
def in_order(of_rows, PANELS: tl.constexpr, PAIRED: tl.constexpr):
    """Reorder [PANELS, ROWS] to the row order of a product: [PANELS * ROWS]."""
    if PAIRED:
        return tl.reshape(tl.permute(tl.reshape(of_rows, [PANELS // 2, 2, 2, 8]), (0, 2, 1, 3)), [PANELS * ROWS])
    else:
        return tl.reshape(of_rows, [PANELS * ROWS])


@triton.jit
def gate_and_up(sums, PANELS: tl.constexpr):
    """Split a paired product [PANELS * ROWS, B] into gate and up, float32 [PANELS * 8, B] each."""
    tokens: tl.constexpr = sums.shape[1]
    both = tl.permute(tl.reshape(sums, [PANELS // 2, 2, 2, 8, tokens]), (0, 1, 3, 4, 2))
    gate, up = tl.split(both)
    return tl.reshape(gate, [PANELS * 8, tokens]), tl.reshape(up, [PANELS * 8, tokens])


@triton.jit
def _weights(words, PANELS: tl.constexpr, PAIRED: tl.constexpr):
    """Reinterpret words [PANELS, lines, 2, 8] as e4m3 [PANELS * ROWS, columns]."""
    LINES: tl.constexpr = words.shape[1]
    if PAIRED:
        permuted = tl.permute(tl.reshape(words, [PANELS // 2, 2, LINES, 2, 8]), (0, 3, 1, 4, 2))
    else:
        permuted = tl.permute(words, (0, 2, 3, 1))
    word = tl.reshape(permuted, [PANELS * ROWS, LINES])
    even = tl.join(word.to(tl.int8), (word >> 16).to(tl.int8))
    odd = tl.join((word >> 8).to(tl.int8), (word >> 24).to(tl.int8))
    return tl.reshape(tl.join(even, odd), [PANELS * ROWS, LINES * 4]).to(tl.float8e4nv, bitcast=True)


@triton.jit
def fp8_products(
    address, first, x, x_scale,
    SCALE: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr, COUNT: tl.constexpr,
    BY_GROUP: tl.constexpr, LINES: tl.constexpr, PANELS: tl.constexpr, STAGES: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Products of PANELS panels from `first` on with rows at addresses x [B], whose scales are at x_scale [B]: float32
    [PANELS * ROWS, B]. Panels beyond COUNT repeat the last one.

    PAIRED: rows are reordered so that eight rows of a panel alternate with eight of the next one: a thread then has a
    row of gate and its row of up. LINES: lines with as many columns as share a scale.
    """
    panel = tl.minimum(first + tl.arange(0, PANELS), COUNT - 1).to(tl.int64)
    line = tl.arange(0, LINES)
    row = (tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :])[None, None, :, :]  # see panels_first.py
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    at = words + panel[:, None, None, None] * PANEL_WORDS + line[None, :, None, None] * ROWS + row
    area = words + panel * PANEL_WORDS + PANEL_LINES * ROWS
    x_at = x[:, None] + tl.arange(0, LINES * 4)[None, :]
    total = tl.zeros([PANELS * ROWS, x.shape[0]], tl.float32)
    of_x = tl.load(x_scale)[None, :]  # scales of the first group of columns, or of the whole row
    for start in tl.range(0, PANEL_LINES, LINES, num_stages=STAGES):
        if PANEL_LINES % LINES == 0:
            part = tl.load(at + start * ROWS)
        else:
            part = tl.load(at + start * ROWS, (line < PANEL_LINES - start)[None, :, None, None], 0)
        value = tl.trans(tl.load(x_at + start * 4))
        products = tl.dot(_weights(part, PANELS, PAIRED), value)
        if BY_GROUP:
            group = start // LINES
            scale = _row_scales(area, group, SCALE, PANELS, PAIRED)
            total += products * (scale[:, None] * tl.load(x_scale + group)[None, :])
        else:
            total += products * of_x
    if BY_GROUP:
        return total
    else:
        return total * _row_scales(area, 0, SCALE, PANELS, PAIRED)[:, None]
