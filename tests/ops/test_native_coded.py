"""Quantised values (codes) with separate scales, packed by workers, against float64: every code, every storage order,
from files and memory, as a whole and split within a block of scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from packing import Packed, bf16_bits, bf16_values, e2m1_values, e4m3_values
from proa.native.fill import Fill, NotFiniteError, Scales, StoredRows, decode, fill
from proa.native.formats import PANEL_ROWS, Code, Format, Layout, Order, Stored, layout
from proa.native.pool import Pool
from proa.native.weights import Matrix, Rows, linear

ROWS, COLUMNS = 80, 288
NUMBERS = {Stored.F32: np.float32, Stored.F16: np.float16, Stored.BF16: np.uint16}


@dataclass(frozen=True)
class Case:
    """scale_rows: rows that share a scale; 0: all. group: columns; 0: all."""

    form: Format
    code: Code
    kind: Stored | Code
    scale_rows: int
    group: int
    order: Order = Order.ROWS


CASES = {
    "fp8 block": Case(Format.FP8_PANEL, Code.E4M3, Stored.F32, 32, 128),
    "fp8 tensor": Case(Format.FP8_PANEL, Code.E4M3, Stored.F32, 0, 0),
    "fp8 channel": Case(Format.FP8_ROW, Code.E4M3, Stored.F32, 1, 0),
    "mxfp8": Case(Format.MXFP8, Code.E4M3, Code.E8M0, 1, 32),
    "int8 channel": Case(Format.INT8_F32, Code.INT8, Stored.F32, 1, 0),
    "uint8": Case(Format.INT8_F32, Code.UINT8, Stored.F32, 1, 32),
    "uint8 transposed": Case(Format.INT8_F32, Code.UINT8, Stored.F32, 1, 32, Order.WORDS),
    "int4 f32": Case(Format.INT4_F32, Code.INT4, Stored.F32, 1, 32),
    "int4 f16": Case(Format.INT4_F16, Code.INT4, Stored.F16, 1, 96),
    "int4 bf16": Case(Format.INT4_BF16, Code.INT4, Stored.BF16, 1, 32),
    "int4 channel": Case(Format.INT4_BF16, Code.INT4, Stored.BF16, 1, 0),
    "int4 transposed": Case(Format.INT4_F16, Code.INT4, Stored.F16, 1, 32, Order.WORDS),
    "uint4": Case(Format.UINT4_F32, Code.UINT4, Stored.F32, 1, 32),
    "uint4 transposed": Case(Format.UINT4_F32, Code.UINT4, Stored.F32, 1, 32, Order.WORDS),
    "uint4 awq": Case(Format.UINT4_F32, Code.UINT4, Stored.F32, 1, 48, Order.AWQ),
    "int4 awq": Case(Format.INT4_F16, Code.INT4, Stored.F16, 1, 32, Order.AWQ),
    "signed4 f32": Case(Format.INT4_F32, Code.SIGNED4, Stored.F32, 1, 32),
    "signed4 f16": Case(Format.INT4_F16, Code.SIGNED4, Stored.F16, 1, 96),
    "signed4 bf16": Case(Format.INT4_BF16, Code.SIGNED4, Stored.BF16, 1, 32),
    "signed4 channel": Case(Format.INT4_BF16, Code.SIGNED4, Stored.BF16, 1, 0),
    "nvfp4": Case(Format.NVFP4, Code.E2M1, Code.E4M3, 1, 16),
    "mxfp4": Case(Format.MXFP4, Code.E2M1, Code.E8M0, 1, 32),
}


@dataclass
class Coded:
    """rows: where the codes are. values: float64 [ROWS, COLUMNS]."""

    rows: StoredRows
    bytes: np.ndarray
    values: np.ndarray
    layout: Layout


def values_of(code: Code, codes: np.ndarray) -> np.ndarray:
    match code:
        case Code.E4M3:
            return e4m3_values(codes)
        case Code.INT8:
            return codes.view(np.int8).astype(np.float64)
        case Code.E2M1:
            return e2m1_values(codes)
        case Code.SIGNED4:
            return codes.astype(np.float64) - 16 * (codes >= 8)
    return codes.astype(np.float64) - {Code.UINT8: 128, Code.INT4: 8, Code.UINT4: 0}[code]


def stored_bytes(case: Case, codes: np.ndarray) -> tuple[np.ndarray, int]:
    """The codes in storage order, and the bytes between stored rows."""
    bits = 8 if case.code in (Code.E4M3, Code.INT8, Code.UINT8) else 4
    if case.order is Order.AWQ:
        eights = codes.T.reshape(COLUMNS, ROWS // 8, 8).astype(np.uint32)
        words = sum(eights[..., row] << np.uint32(4 * place) for place, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
        return np.ascontiguousarray(words, dtype=np.uint32), ROWS // 2
    if case.order is Order.WORDS:
        per = 32 // bits
        parts = codes.reshape(ROWS, COLUMNS // per, per).astype(np.uint32)
        words = sum(parts[..., i] << np.uint32(bits * i) for i in range(per))
        return np.ascontiguousarray(words.T, dtype=np.uint32), ROWS * 4
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(packed, dtype=np.uint8), COLUMNS * bits // 8


def numbers(kind: Stored | Code, size: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """As they are stored, and their values."""
    if kind is Code.E8M0:
        codes = np.random.default_rng(seed).integers(115, 130, size.shape).astype(np.uint8)
        return codes, 2.0 ** (codes.astype(np.float64) - 127)
    if kind is Code.E4M3:
        codes = np.random.default_rng(seed).integers(0, 0x7F, size.shape).astype(np.uint8)
        return codes, e4m3_values(codes)
    if kind is Stored.BF16:
        bits = bf16_bits(size)
        return bits, bf16_values(bits)
    made = size.astype(NUMBERS[kind])
    return made, made.astype(np.float64)


def make(case: Case) -> Coded:
    rng = np.random.default_rng(hash(case.order) % 97 + case.group)
    bits = 8 if case.code in (Code.E4M3, Code.INT8, Code.UINT8) else 4
    codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS)).astype(np.uint8)
    codes[:, : 1 << min(bits, 8)] = np.arange(1 << bits, dtype=np.uint8)  # all of them in every row
    if case.code is Code.E4M3:
        codes[(codes & 0x7F) == 0x7F] = 1
    groups = -(-COLUMNS // (case.group or COLUMNS))
    scale_rows = -(-ROWS // (case.scale_rows or ROWS))
    size = rng.uniform(0.005, 0.02, (scale_rows, groups))
    if case.code is Code.UINT4:
        size = size.astype(np.float16).astype(np.float64)  # as checkpoints have them: products with codes are exact
    stored, scales = numbers(case.kind, size, 1)
    spread = np.arange(ROWS) // (case.scale_rows or ROWS)
    by_column = np.arange(COLUMNS) // (case.group or COLUMNS)
    values = values_of(case.code, codes) * scales[spread][:, by_column]
    mins, factor = None, 1.0
    if case.code is Code.UINT4:
        mins, minimums = numbers(case.kind, -scales * rng.integers(0, 16, scales.shape), 2)
        values = values + minimums[spread][:, by_column]
    if case.form is Format.NVFP4:
        factor = 0.0078125 * 1.25
        values = values * factor
    stride = stored.strides[0] if case.scale_rows else 0
    of = Scales(
        case.kind, stored.ctypes.data, stride, case.scale_rows or 16, 0, case.group, (stored, mins), 0,
        mins.ctypes.data if mins is not None else 0, factor,
    )  # fmt: skip
    raw, row_bytes = stored_bytes(case, codes)
    rows = StoredRows(case.code, raw.ctypes.data, row_bytes, order=case.order, scales=of)
    return Coded(rows, raw, values, layout(case.form, ROWS, COLUMNS, case.group))


@pytest.fixture(scope="module")
def pool():
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(params=CASES)
def coded(request) -> Coded:
    return make(CASES[request.param])


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Each is one product; minimums, and the parts of fp16 sums, cancel what is larger."""
    np.testing.assert_allclose(got, want, rtol=2.0**-21, atol=2.0**-24 * 64)


def unpacked(pool: Pool, of: Layout, memory: np.ndarray) -> np.ndarray:
    """The matrix by products with unit vectors, few at a time: nothing is rounded."""
    base = memory.ctypes.data
    packed = Packed.__new__(Packed)
    packed.layout = of
    matrix = Matrix(of, [packed._piece(base, 0, 1)])
    identity, found = bf16_bits(np.eye(COLUMNS)), []
    for first in range(0, COLUMNS, 12):
        x = np.ascontiguousarray(identity[first : first + 12])
        y = np.full((len(x), of.rows), np.nan, np.float32)
        linear(pool, matrix, Rows(x.ctypes.data, COLUMNS), Rows(y.ctypes.data, of.rows, True), len(x), outputs=of.rows)
        found.append(y.T)
    return np.concatenate(found, 1)


def aligned(nbytes: int) -> np.ndarray:
    memory = np.full(nbytes + 64, 0xFF, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:nbytes]


def test_kept(coded: Coded, pool: Pool) -> None:
    out = aligned(coded.layout.matrix_bytes)
    fill(pool, [Fill(coded.rows, coded.layout, out.ctypes.data, out.nbytes)])
    assert_same(unpacked(pool, coded.layout, out), coded.values)


def test_from_a_file_and_in_parts(coded: Coded, pool: Pool, tmp_path: Path) -> None:
    """From a file, in parts that begin at any panel, the packed bytes are the same."""
    whole, parts = aligned(coded.layout.matrix_bytes), aligned(coded.layout.matrix_bytes)
    fill(pool, [Fill(coded.rows, coded.layout, whole.ctypes.data, whole.nbytes)])
    file = tmp_path / "codes"
    file.write_bytes(b"before" + coded.bytes.tobytes())
    with file.open("rb") as stream:
        rows = replace(coded.rows, start=6, fd=stream.fileno())
        job = Fill(rows, coded.layout, parts.ctypes.data, parts.nbytes)
        fill(pool, [job.part(first, min(48, ROWS - first)) for first in (0, 48)])
    np.testing.assert_array_equal(whole, parts)


def test_as_numbers(coded: Coded, pool: Pool) -> None:
    """float32, and bfloat16 of it: plain rows and panels."""
    floats = np.full((ROWS, COLUMNS), np.nan, np.float32)
    decode(coded.rows, ROWS, COLUMNS, floats.ctypes.data)
    np.testing.assert_allclose(floats, coded.values, rtol=2.0**-23, atol=0)
    to = layout(Format.BF16, ROWS, COLUMNS)
    plain, panels = np.zeros((ROWS, COLUMNS), np.uint16), aligned(to.matrix_bytes)
    fill(pool, [Fill(coded.rows, to, plain.ctypes.data, plain.nbytes, plain=True)])
    np.testing.assert_array_equal(plain, bf16_bits(floats))
    fill(pool, [Fill(coded.rows, to, panels.ctypes.data, panels.nbytes)])
    np.testing.assert_array_equal(unpacked(pool, to, panels), bf16_values(bf16_bits(floats)))


def test_nan_is_decoded_and_not_packed(pool: Pool) -> None:
    case = CASES["fp8 channel"]
    coded = make(case)
    out = aligned(coded.layout.matrix_bytes)
    job = Fill(coded.rows, coded.layout, out.ctypes.data, out.nbytes)
    fill(pool, [job])
    coded.bytes[3, 5] = 0x7F
    with pytest.raises(NotFiniteError) as caught:
        fill(pool, [job.part(0, PANEL_ROWS), job])
    assert caught.value.job in (0, 1)
    floats = np.zeros((ROWS, COLUMNS), np.float32)
    decode(coded.rows, ROWS, COLUMNS, floats.ctypes.data)
    assert np.argwhere(np.isnan(floats)).tolist() == [[3, 5]]


@pytest.mark.parametrize(
    ("change", "form", "group", "problem"),
    [
        ({"scales": None}, Format.FP8_PANEL, 128, "scales"),
        ({"code": Code.INT4}, Format.FP8_PANEL, 128, "cannot hold the stored type"),
        ({}, Format.FP8_ROW, 0, "cannot hold the stored type"),
        ({}, Format.FP8_PANEL, 64, "cannot hold the stored type"),
        ({"first": 8}, Format.FP8_PANEL, 128, "cannot hold the stored type"),
        ({"kind": Stored.F16}, Format.FP8_PANEL, 128, "cannot hold the stored type"),
        ({"factor": 2.0}, Format.FP8_PANEL, 128, "cannot hold the stored type"),
        ({"group_of": 1}, Format.FP8_PANEL, 128, "cannot hold the stored type"),
        ({"order": Order.TRANSPOSED}, Format.FP8_PANEL, 128, "cannot have the transposed order of plain types"),
        ({"stride": 100}, Format.FP8_PANEL, 128, "overlap"),
    ],
)
def test_jobs_that_make_no_sense(change, form, group, problem, pool: Pool) -> None:
    coded = make(CASES["fp8 block"])
    rows, scales = coded.rows, coded.rows.scales
    assert scales is not None
    match change:
        case {"code": code}:
            rows = replace(rows, stored=code)
        case {"order": _} | {"stride": _} | {"scales": _}:
            rows = replace(rows, **change)
        case {**of}:
            rows = replace(rows, scales=replace(scales, **of))
    out = np.zeros(1 << 20, np.uint8)
    with pytest.raises(ValueError, match=problem):
        fill(pool, [Fill(rows, layout(form, ROWS, COLUMNS, group), out.ctypes.data, out.nbytes)])
    assert not out.any()
