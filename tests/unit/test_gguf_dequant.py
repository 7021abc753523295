"""Dequantisation against the gguf package, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from proa.native.fill import to_float
from proa.native.formats import Stored, stored_facts
from proa.weights.gguf_header import blocks

TYPES = [stored.name for stored in Stored if stored_facts(stored).block_values > 1]


def dequantise(raw: np.ndarray, dtype: str) -> np.ndarray:
    """uint8 [rows, bytes] -> float32 [rows, elements]."""
    elems, block_bytes = blocks()[dtype]
    out = np.full((raw.shape[0], raw.shape[1] // block_bytes * elems), np.nan, dtype=np.float32)
    to_float(Stored[dtype], raw.ctypes.data, raw.nbytes, out.size, out.ctypes.data)
    return out


@pytest.mark.parametrize("dtype", TYPES)
def test_block_sizes(dtype: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]] == blocks()[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_bit(dtype: str) -> None:
    """Random bytes: all codes, scales of either sign, subnormal and infinite ones, too."""
    elems, block_bytes = blocks()[dtype]
    rows, count = 61, 4 * 256 // elems
    raw = np.random.default_rng(3).integers(0, 256, (rows, count, block_bytes), dtype=np.uint8)
    if dtype == "MXFP4":  # the package halves codes and scales, which differs only for the scales 2^-127 and NaN
        raw[..., 0] = np.clip(raw[..., 0], 1, 254)
    raw = raw.reshape(rows, -1)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    got = dequantise(raw, dtype)
    assert got.shape == want.shape == (rows, 1024)
    finite = np.isfinite(want)
    assert finite.mean() > 0.9
    zeros = got == 0  # of either sign: the package's MXFP4 has no negative one
    np.testing.assert_array_equal(got[finite & ~zeros].view(np.uint32), want[finite & ~zeros].view(np.uint32))
    np.testing.assert_array_equal(want[zeros], 0)
    np.testing.assert_array_equal(np.isfinite(got), finite)


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_numbers_come_back(dtype: str) -> None:
    values = np.random.default_rng(4).standard_normal((8, 256)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[dtype])
    got = dequantise(raw, dtype)
    levels = 2 ** int(dtype[1])
    spread = np.abs(values.reshape(8, -1, 32)).max(axis=2, keepdims=True) * np.ones(32)
    # A code is at most one step off at the end of the asymmetric range; scales round to 11 bits.
    assert (np.abs(got - values) <= (2 * 1.01 * spread / (levels - 1)).reshape(8, 256)).all()
