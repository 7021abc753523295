"""How kernels read packed weights (csrc/src/layout.h) as they lie: the bytes that the CPU's kernels read, in VRAM or in
mapped host memory. Belongs here: what depends on the layout and its formats. Never: what is done with the products.

A panel is lines of 64 bytes; a line is a 32-bit word of each of 16 rows. Words are loaded, 16 bytes a thread, and
decoded in registers: a format is a branch of `decoded`, and scales would be read beside the words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from proa.native.formats import Format, Layout

ROWS = 16
VALUES = {Format.BF16: 2}  # of a word
WIDE = tl.constexpr(64)  # rows from which Hopper has an instruction that reads the weights from shared memory


def constants(of: Layout, columns: int) -> dict[str, object]:
    """Of a kernel that multiplies with packed weights, `columns` of which count."""
    lines = of.padded_columns // VALUES[of.format]
    return {
        "FORMAT": int(of.format), "COLUMNS": columns, "PANEL_LINES": lines, "PANEL_WORDS": of.panel_bytes // 4,
        "COUNT": of.panels,
    }  # fmt: skip


@triton.jit
def decoded(words, i: tl.constexpr, FORMAT: tl.constexpr):
    """Value i of each word, float32."""
    tl.static_assert(FORMAT == 0)
    bits = words << 16 if i == 0 else words & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def halves(words, FORMAT: tl.constexpr):
    """Values of words [lines, rows] as bfloat16 [columns, rows]."""
    tl.static_assert(FORMAT == 0)
    pair = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    bits = tl.reshape(tl.permute(pair, (0, 2, 1)), [words.shape[0] * 2, words.shape[1]])
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def panel_sums(
    address, first, x,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr,
    COUNT: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Products of PANELS panels from `first` on with one row of activations: float32 [PANELS, 16].

    LINES is less than the threads of a program, so that each loads its own few of x and no barrier is needed for them.
    Panels beyond COUNT are the last one again.
    """
    panel = tl.minimum(first + tl.arange(0, PANELS), COUNT - 1).to(tl.int64)
    line = tl.arange(0, LINES)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    at = words + panel[:, None, None] * PANEL_WORDS + line[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    total = tl.zeros([PANELS, LINES, 16], tl.float32)
    for start in tl.range(0, PANEL_LINES, LINES, num_stages=STAGES):
        if PANEL_LINES % LINES == 0:
            part = tl.load(at + start * 16)
        else:
            part = tl.load(at + start * 16, (line < PANEL_LINES - start)[None, :, None], 0)
        for i in tl.static_range(VALUES):
            column = (start + line) * VALUES + i
            if COLUMNS % (LINES * VALUES) == 0:
                value = tl.load(x + column)
            else:
                value = tl.load(x + column, column < COLUMNS, 0.0)
            total += decoded(part, i, FORMAT) * value.to(tl.float32)[None, :, None]
    return tl.sum(total, 1)


@triton.jit
def panel_products(
    address, first, x, exists,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, PANEL_LINES: tl.constexpr, PANEL_WORDS: tl.constexpr,
    COUNT: tl.constexpr, PANELS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The same with rows at addresses x [B] of activations, on the matrix unit: float32 [B, PANELS * 16].

    Rows that do not exist count as zeros. Weights are rounded to bfloat16 once, if they are of another format.
    """
    panel = tl.minimum(first + tl.arange(0, PANELS), COUNT - 1).to(tl.int64)
    if x.shape[0] >= WIDE:
        # A thread copies four lines of four rows, which it can turn before wgmma's operand is stored.
        line = (tl.arange(0, LINES // 4)[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :, None]
        panel = panel[None, :, None, None]
        row = tl.arange(0, 16)[None, None, None, :]
    else:
        # Of four lines, the second and third change places in shared memory: the lanes of a warp, which take every
        # other line, then meet in a bank two at a time instead of four.
        pair = tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
        line = (tl.arange(0, LINES // 4)[None, None, :] * 4 + pair[:, :, None])[:, :, :, None, None]
        panel = panel[None, None, None, :, None]
        row = tl.arange(0, 16)[None, None, None, None, :]
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    at = words + panel * PANEL_WORDS + line * 16 + row
    column = tl.arange(0, LINES * VALUES)
    x_at = x[:, None] + column[None, :]
    total = tl.zeros([x.shape[0], PANELS * 16], tl.float32)
    for start in tl.range(0, PANEL_LINES, LINES, num_stages=STAGES):
        if PANEL_LINES % LINES == 0:
            part = tl.load(at + start * 16)
        else:
            part = tl.load(at + start * 16, line < PANEL_LINES - start, 0)
        if COLUMNS % (LINES * VALUES) == 0:
            value = tl.load(x_at + start * VALUES, exists[:, None], 0.0)
        else:
            value = tl.load(x_at + start * VALUES, exists[:, None] & (column < COLUMNS - start * VALUES)[None, :], 0.0)
        part = tl.permute(part, (0, 2, 1, 3) if x.shape[0] >= WIDE else (2, 0, 1, 3, 4))
        total = tl.dot(value, halves(tl.reshape(part, [LINES, PANELS * 16]), FORMAT), total)
    return total


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """float32, by the numbers of native Activation."""
    tl.static_assert(ACTIVATION == 0 or ACTIVATION == 1)
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    else:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
