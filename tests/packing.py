"""Random weights of every packed format, with their exact values, for tests of native kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from proa.native.fill import Fill, StoredRows, fill
from proa.native.formats import Form, Format, Layout, PackSource, Stored, facts, layout, pack, usual_forms
from proa.native.pool import Pool
from proa.native.weights import Matrix, Piece

# (format, group): every format in the table's order, with its usual group; then other groups.
CASES = [*usual_forms().values(), Form(Format.FP8_PANEL, 0), Form(Format.INT8_F32, 32), Form(Format.INT4_BF16, 64)]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent > 0, (8.0 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    size = np.where((codes & 0x7F) == 0x7F, np.nan, size)
    return np.where(codes & 0x80, -size, size)


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])


@dataclass
class Weights:
    """A matrix [rows, columns] in one format: exact float64 values, and the codes and scales they consist of."""

    format: Format
    group: int
    values: np.ndarray
    scaled: np.ndarray  # |code * scale|: the size of what is summed, where a minimum cancels part of it
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    scale_rows: int = 1
    factor: float = 1.0

    @property
    def layout(self) -> Layout:
        return layout(self.format, *self.values.shape, self.group)

    def source(self) -> PackSource:
        a = self.arrays

        def address(name: str) -> int | None:
            return a[name].ctypes.data if name in a else None

        def stride(name: str) -> int:
            return a[name].strides[0] if name in a else 0

        return PackSource(
            address("codes"), stride("codes"), address("scales"), stride("scales"), self.scale_rows,
            address("mins"), address("block_scales"), address("block_mins"), stride("block_scales"), self.factor,
        )  # fmt: skip


class Packed:
    """Packed memory and its Matrix; pieces: number of nodes over which the panels are split."""

    def __init__(self, stack: list[Weights], pieces: int = 1, paired: list[Weights] | None = None) -> None:
        """`paired` weights (up) alternate panel by panel with those of `stack` (gate)."""
        one = stack[0].layout
        step = 2 if paired else 1
        rows = one.panels * 16 * step if paired else one.rows
        self.layout = layout(one.format, rows, one.columns, one.group)
        nbytes = self.layout.matrix_bytes
        self._memory = np.zeros(len(stack) * nbytes + 64, dtype=np.uint8)
        base = -(-self._memory.ctypes.data // 64) * 64
        self.memory = (ctypes.c_char * (len(stack) * nbytes)).from_address(base)
        for i, weights in enumerate(stack):
            at = base + i * nbytes
            pack(weights.layout, weights.source(), one.rows, step, at, nbytes)
            if paired:
                pack(paired[i].layout, paired[i].source(), one.rows, 2, at + one.panel_bytes, nbytes - one.panel_bytes)
        units = self.layout.panels // step
        firsts = [units * i // pieces * step for i in range(pieces)] + [self.layout.panels]
        self.matrix = Matrix(self.layout, [self._piece(base, firsts[i], len(stack)) for i in range(pieces)], len(stack))

    def _piece(self, base: int, first: int, count: int) -> Piece:
        offset = first * self.layout.panel_bytes
        return Piece(first, base + offset, self.layout.matrix_bytes, count * self.layout.matrix_bytes - offset)


def random_weights(
    form: Format, group: int, rows: int, columns: int, seed: int, *, every_code: bool = False
) -> Weights:
    """Random weights of one format; every_code: columns enumerate all codes instead."""
    rng = np.random.default_rng(seed)
    if facts(form).scale == "none":
        return _plain(form, rng, rows, columns)
    blocks = facts(form).block_groups
    groups = -(-columns // (group * blocks)) * blocks if group else 1
    codes, code_values = _codes(form, rng, rows, columns, every_code)
    weights = Weights(form, group, code_values, code_values, {"codes": codes})
    scale = _scales(form, rng, rows, groups, weights)
    spread = np.arange(columns) // (group or columns)
    weights.values = code_values * scale[:, spread]
    weights.scaled = np.abs(weights.values)
    if "mins" in weights.arrays:
        minimum = _minimums(form, weights)[:, spread]
        weights.values = weights.values + minimum
        weights.scaled = weights.scaled + np.abs(minimum)
    return weights


def _plain(form: Format, rng: np.random.Generator, rows: int, columns: int) -> Weights:
    values = rng.standard_normal((rows, columns)).astype(np.float32) * 0.1
    if form is Format.BF16:
        bits = bf16_bits(values)
        exact = bf16_values(bits)
    else:
        half = values.astype(np.float16)
        half.flat[0] = 2.0**-24  # a subnormal
        bits, exact = half.view(np.uint16), half.astype(np.float64)
    return Weights(form, 0, exact, np.abs(exact), {"codes": bits})


def _codes(
    form: Format, rng: np.random.Generator, rows: int, columns: int, every: bool
) -> tuple[np.ndarray, np.ndarray]:
    code = facts(form).code
    bits = 5 if code == "uint6" else facts(form).code_bits
    codes = rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    if every:
        codes = ((np.arange(rows)[:, None] + np.arange(columns)) % (1 << bits)).astype(np.uint8)
    match code:
        case "e4m3":
            codes[(codes & 0x7F) == 0x7F] = 1
            return codes, e4m3_values(codes)
        case "int8":
            codes.flat[0] = 128
            return codes, codes.view(np.int8).astype(np.float64)
        case "e2m1":
            return codes, e2m1_values(codes)
        case "int6":
            return codes, codes.astype(np.float64) - 32
    return codes, codes.astype(np.float64) - (8 if code == "int4" else 0)


def _stored(form: Format, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales as stored in the format's scale type, and their exact values."""
    if facts(form).scale == "f16":
        half = values.astype(np.float16)
        return half, half.astype(np.float64)
    if facts(form).scale == "bf16":
        bits = bf16_bits(values)
        return bits, bf16_values(bits)
    return values.astype(np.float32), values.astype(np.float32).astype(np.float64)


def _scales(form: Format, rng: np.random.Generator, rows: int, groups: int, to: Weights) -> np.ndarray:
    values = rng.uniform(0.005, 0.02, (rows, groups))
    a = to.arrays
    match facts(form).scale:
        case "e8m0":
            low, high = (105, 117) if form is Format.MXFP8 else (115, 127)
            a["scales"] = rng.integers(low, high, (rows, groups)).astype(np.uint8)
            return 2.0 ** (a["scales"].astype(np.float64) - 127)
        case "e4m3":
            a["scales"] = rng.integers(0, 0x7F, (rows, groups)).astype(np.uint8)
            to.factor = 0.0078125 * 1.25
            return e4m3_values(a["scales"]) * to.factor
        case "f32_panel":
            to.scale_rows = 128
            a["scales"] = values[: -(-rows // 128)].astype(np.float32)
            return a["scales"].astype(np.float64)[np.arange(rows) // 128]
        case "block8":
            a["scales"] = rng.integers(0, 64, (rows, groups)).astype(np.uint8)
            a["mins"] = rng.integers(0, 64, (rows, groups)).astype(np.uint8)
            a["block_scales"] = (values[:, ::8] / 32).astype(np.float16)
            a["block_mins"] = (values[:, ::8] / 4).astype(np.float16)
            return a["scales"] * np.repeat(a["block_scales"].astype(np.float64), 8, 1)
        case "block16":
            a["scales"] = rng.integers(-128, 128, (rows, groups)).astype(np.int8).view(np.uint8)
            a["block_scales"] = (values[:, ::16] / 64).astype(np.float16)
            return a["scales"].view(np.int8) * np.repeat(a["block_scales"].astype(np.float64), 16, 1)
    a["scales"], exact = _stored(form, values)
    if facts(form).has_min:
        a["mins"], _ = _stored(form, -values * rng.uniform(6, 9, values.shape))
    return exact


def _minimums(form: Format, weights: Weights) -> np.ndarray:
    mins = weights.arrays["mins"]
    if facts(form).scale == "block8":
        return -(mins * np.repeat(weights.arrays["block_mins"].astype(np.float64), 8, 1))
    return bf16_values(mins) if facts(form).scale == "bf16" else mins.astype(np.float64)


def pack_blocks(pool: Pool, type_: Stored, blocks: np.ndarray, to: Layout) -> Packed:
    """GGUF rows of blocks [rows, row bytes] packed into memory of their own."""
    packed = Packed.__new__(Packed)
    packed.layout = to
    packed._memory = np.zeros(to.matrix_bytes + 64, dtype=np.uint8)
    base = -(-packed._memory.ctypes.data // 64) * 64
    rows = StoredRows(type_, blocks.ctypes.data, blocks.strides[0])
    fill(pool, [Fill(rows, to, base, to.matrix_bytes)])
    packed.matrix = Matrix(to, [packed._piece(base, 0, 1)])
    return packed
