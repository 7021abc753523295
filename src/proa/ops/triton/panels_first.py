"""Products of many tokens with packed bfloat16 weights on the tensor cores, with the weights as first operand: a word
of a panel is two neighbouring columns of one row, exactly what a thread holds of that operand. Weights go from shared
memory to registers into the product, without a transpose or another store. Never: few tokens (panels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from proa.ops.triton.panels import ROWS, whole_stages


@triton.jit
def panels_first(
    address, first, x, exists,
    CODE: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr,
    COUNT: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, VALUES: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """panels.panel_products for bfloat16 only, transposed: float32 [PANELS * ROWS, B].

    PAIRED: even panels first, then odd ones. With four warps and eight panels per program, a row of gate and its row of
    up are then in the same thread.
    """
    tl.static_assert(CODE == "bf16")
    place = tl.arange(0, PANELS)
    if PAIRED:
        place = place % (PANELS // 2) * 2 + place // (PANELS // 2)
    panel = tl.minimum(first + place, COUNT - 1).to(tl.int64)[:, None, None, None]
    line = tl.arange(0, LINES)
    # Rows are split in halves of eight: shared memory then holds eight rows of a line, followed by the next line's, and
    # the 8 x 4 words that a warp loads at once are in 32 different banks.
    row = (tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :])[None, None, :, :]
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    at = words + panel * PANEL_WORDS + line[None, :, None, None] * ROWS + row
    column = tl.arange(0, LINES * VALUES)
    x_at = x[:, None] + column[None, :]
    total = tl.zeros([PANELS * ROWS, x.shape[0]], tl.float32)
    for start in tl.range(0, PANEL_LINES, LINES, num_stages=STAGES):
        if PANEL_LINES % LINES == 0:
            part = tl.load(at + start * ROWS)
        else:
            part = tl.load(at + start * ROWS, (line < PANEL_LINES - start)[None, :, None, None], 0)
        if whole_stages(COLUMNS, PANEL_LINES, LINES, VALUES):
            value = tl.load(x_at + start * VALUES, exists[:, None], 0.0)
        else:
            value = tl.load(x_at + start * VALUES, exists[:, None] & (column < COLUMNS - start * VALUES)[None, :], 0.0)
        part = tl.reshape(tl.permute(part, (0, 2, 3, 1)), [PANELS * ROWS, LINES])
        both = tl.join(part.to(tl.int16), (part >> 16).to(tl.int16))
        weights = tl.reshape(both, [PANELS * ROWS, LINES * VALUES]).to(tl.bfloat16, bitcast=True)
        total = tl.dot(weights, tl.trans(value), total)
    return total
