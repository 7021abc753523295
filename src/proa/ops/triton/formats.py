"""Decoding of packed weights (csrc/src/layout.h) in registers: codes (quantised values) and scales. Belongs here:
formats. Never: where panels lie, products.

Codes become float32 without integer-to-float conversions: their bits are shifted into a float's fields. 4-bit and 8-bit
floats go through float16, which represents all of them exactly, subnormal ones too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function

from proa.native.formats import BF16_FORM, Form, Format, facts, usual_forms


def names(of: Format) -> dict[str, object]:
    """Constants of a kernel that decodes the format: the types of its code and scale in the table of formats."""
    return {"CODE": facts(of).code, "SCALE": facts(of).scale}


def examples() -> list[Form]:
    """Every format but bfloat16 with a usual group: these are compiled for every architecture."""
    return [form for form in usual_forms().values() if form != BF16_FORM]


@constexpr_function
def unit_of(code):
    """The factor by which the results of `value` must be multiplied."""
    return 256.0 if code == "e4m3" else 16384.0 if code == "e2m1" else 1.0


@constexpr_function
def line_words(code):
    return 3 if code == "int6" or code == "uint6" else 1


@constexpr_function
def has_minimum(code):
    return code == "uint4" or code == "uint6"


@constexpr_function
def by_group(code, scale, group, padded):
    """True if scales or minimums vary within a row, so that they are applied per group."""
    return code == "uint4" or code == "uint6" or (scale != "none" and group < padded)


@triton.jit
def _integer(words, shift: tl.constexpr, bits: tl.constexpr, zero: tl.constexpr):
    """Extract an integer code of `bits` bits at bit `shift` (below bit 16) of each word, minus `zero`, as float32: the
    bits become the lowest mantissa bits of 2^23 / 2^shift + code."""
    mask: tl.constexpr = ((1 << bits) - 1) << shift
    magic: tl.constexpr = (150 - shift) << 23
    number: tl.constexpr = float((1 << (23 - shift)) + zero)
    return ((words & mask) | magic).to(tl.float32, bitcast=True) - number


@triton.jit
def half(words, odd: tl.constexpr):
    """The lower or the upper float16 of words, as float32."""
    return (words >> 16 if odd else words).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def value(words, i: tl.constexpr, CODE: tl.constexpr):
    """Value i of each word, float32, exact, unscaled and still to be multiplied by `unit_of`; for NaN codes see
    `has_nan`."""
    pair: tl.constexpr = i // 2
    if CODE == "bf16":
        return (words << 16 if i == 0 else words & -65536).to(tl.float32, bitcast=True)
    elif CODE == "int8":
        return _integer((words >> 16 if i % 2 else words) ^ 0x8080, 8 * pair, 8, 128)
    elif CODE == "int4" or CODE == "uint4":
        return _integer(words >> 16 if i % 2 else words, 4 * pair, 4, 8 if CODE == "int4" else 0)
    elif CODE == "e4m3":
        if pair == 0:
            both = ((words << 7) & 0x3F803F80) | ((words << 8) & -0x7FFF8000)
        else:
            both = ((words >> 1) & 0x3F803F80) | (words & -0x7FFF8000)
        return half(both, i % 2)
    else:
        tl.static_assert(CODE == "e2m1")
        if pair == 3:
            both = ((words >> 3) & 0x0E000E00) | (words & -0x7FFF8000)
        else:
            both = ((words << (9 - 4 * pair)) & 0x0E000E00) | ((words << (12 - 4 * pair)) & -0x7FFF8000)
        return half(both, i % 2)


@constexpr_function
def pair_factor(code):
    """Multiplier of the results of `pair`, which holds codes as subnormal bfloat16."""
    return 2.0**120 if code == "e4m3" else 2.0**126 if code == "e2m1" else 2.0**127


@constexpr_function
def pair_zero(code):
    """The number to subtract once pair_factor has been applied."""
    return 1.0 if code == "int4" else 2.0 if code == "int8" else 0.0


@constexpr_function
def pair_unit(code):
    """The factor to multiply sums of products by in the end."""
    return 64.0 if code == "int8" else 8.0 if code == "int4" or code == "uint4" else 1.0


@triton.jit
def pair(words, p: tl.constexpr, CODE: tl.constexpr):
    """Values 2p and 2p + 1 of each word as two bfloat16: see `pair_factor`. All steps are exact in bfloat16."""
    if CODE == "int4" or CODE == "uint4":  # a unit is 2^-130
        return (words << 3 if p == 0 else words >> (4 * p - 3)) & 0x00780078
    elif CODE == "int8":  # the code's top bit goes to the lowest bit of the exponent
        return ((words >> 8 if p else words) ^ 0x00800080) & 0x00FF00FF
    elif CODE == "e4m3":
        nan = tl.where(has_nan(words), 0x7FC07FC0, 0)  # a NaN makes all four values of the word NaN
        size = (words >> 4 if p else words << 4) & 0x07F007F0
        return size | ((words if p else words << 8) & -0x7FFF8000) | nan
    else:
        tl.static_assert(CODE == "e2m1")
        size = words << (6 - 4 * p) if p < 2 else words >> (4 * p - 6)
        return (size & 0x01C001C0) | ((words if p == 3 else words << (12 - 4 * p)) & -0x7FFF8000)


@triton.jit
def six_bits(low, high, i: tl.constexpr, CODE: tl.constexpr):
    """Value i of a line of six-bit codes as float32; low, high: the words with its four low and two upper bits."""
    upper = ((high >> (16 * (i % 2) + 2 * (i // 2))) & 3) << 4
    bits = ((low >> (16 * (i % 2) + 4 * (i // 2 % 4))) & 15) | upper
    return _integer(bits, 0, 6, 32 if CODE == "int6" else 0)


@triton.jit
def has_nan(words):
    """True for words with a NaN among their four e4m3 codes: all seven bits of its magnitude are set."""
    return (((words & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80) != 0


@triton.jit
def scale(area, group, row, CODE: tl.constexpr, SCALE: tl.constexpr):
    """Scales, float32, of groups and rows of a panel whose scales begin at `area` (int32); arguments broadcast."""
    if SCALE == "f32_panel":
        return tl.load(area.to(tl.pointer_type(tl.float32)) + group)
    elif SCALE == "e8m0":
        code = tl.load(area.to(tl.pointer_type(tl.uint8)) + group * 16 + row).to(tl.int32)
        return tl.where(code == 255, 0x7FC00000, code << 23).to(tl.float32, bitcast=True)  # 2^-127 is taken as 0
    elif SCALE == "e4m3":
        code = tl.load(area.to(tl.pointer_type(tl.uint8)) + 64 + group * 16 + row).to(tl.int16)
        return (code << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif SCALE == "block8":
        block = area.to(tl.pointer_type(tl.uint8)) + (group // 8) * 320
        factor = tl.load(block + 64 + (group % 8) * 32 + row).to(tl.float32)
        return tl.load(block.to(tl.pointer_type(tl.float16)) + row).to(tl.float32) * factor
    elif SCALE == "block16":
        block = area.to(tl.pointer_type(tl.int8)) + (group // 16) * 288
        factor = tl.load(block + 32 + (group % 16) * 16 + row).to(tl.float32)
        return tl.load(block.to(tl.pointer_type(tl.float16)) + row).to(tl.float32) * factor
    else:
        return _plain_scale(area, group * 32 if CODE == "uint4" else group * 16, row, SCALE)


@triton.jit
def minimum(area, group, row, SCALE: tl.constexpr):
    """Minimums, which are added to code * scale; arguments as in `scale`."""
    if SCALE == "block8":
        block = area.to(tl.pointer_type(tl.uint8)) + (group // 8) * 320
        factor = tl.load(block + 80 + (group % 8) * 32 + row).to(tl.float32)
        return tl.load(block.to(tl.pointer_type(tl.float16)) + 16 + row).to(tl.float32) * -factor
    else:
        return _plain_scale(area, group * 32 + 16, row, SCALE)


@triton.jit
def _plain_scale(area, first, row, SCALE: tl.constexpr):
    tl.static_assert(SCALE == "f32" or SCALE == "f16" or SCALE == "bf16")
    if SCALE == "f32":
        return tl.load(area.to(tl.pointer_type(tl.float32)) + first + row)
    elif SCALE == "f16":
        return tl.load(area.to(tl.pointer_type(tl.float16)) + first + row).to(tl.float32)
    else:
        return tl.load(area.to(tl.pointer_type(tl.bfloat16)) + first + row).to(tl.float32)


@triton.jit
def factor(area, SCALE: tl.constexpr):
    """The float32 factor of a whole matrix, stored in each panel, for formats that have one."""
    tl.static_assert(SCALE == "e4m3")
    return tl.load(area.to(tl.pointer_type(tl.float32)))
