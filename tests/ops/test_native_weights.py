"""Every packed format on every instruction set against float64. Bounds are derived: the error of a sum of n float32
products is at most n 2^-24 of the sum of magnitudes; that of a weight rounded once to bfloat16 2^-8 of itself.
"""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest

from gguf_blocks import random_blocks
from isas import ISAS
from packing import (
    CASES,
    Packed,
    Weights,
    bf16_bits,
    bf16_values,
    e2m1_values,
    e4m3_values,
    pack_blocks,
    random_weights,
)
from proa.native.formats import Format, Stored, facts, gguf_kept, kept_form, layout
from proa.native.library import library
from proa.native.pool import Pool
from proa.native.weights import Activation, Experts, Matrix, Piece, Rows, linear, moe

HALF_ULP_BF16 = 2.0**-8  # relative: eight significant bits, rounded to nearest
TOKENS = [1, 2, 3, 5, 8, 13, 16, 33, 70]


@pytest.fixture(scope="module", params=ISAS)
def pool(request):
    with Pool([[0], []], isa=request.param, pin=False) as pool:
        yield pool


def activations(tokens: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    bits = bf16_bits(np.random.default_rng(seed).standard_normal((tokens, columns)))
    return bits, bf16_values(bits)


def product(pool: Pool, packed: Packed, x: np.ndarray, rows: int, bias: np.ndarray | None = None) -> np.ndarray:
    y = np.full((len(x), rows + 3), np.nan, dtype=np.float32)
    at = bias.ctypes.data if bias is not None else 0
    linear(
        pool, packed.matrix, Rows(x.ctypes.data, x.shape[1]), Rows(y.ctypes.data, y.shape[1], True), len(x),
        outputs=rows, bias=at,
    )  # fmt: skip
    assert np.isnan(y[:, rows:]).all()  # nothing beyond the row's end is written
    return y[:, :rows]


def sum_bound(w: Weights, x: np.ndarray) -> np.ndarray:
    """Bound of |computed - exact| of x W^T: float32 sums, weights rounded to bfloat16 in long batches, and activations
    in fixed point in short ones (csrc/src/kernels/digits.h)."""
    terms = w.values.shape[1] + 4 * w.layout.padded_columns // (w.group or w.values.shape[1]) + 8
    sums = terms * 2.0**-24 * (np.abs(x) @ w.scaled.T) + (fixed_point(w, x) if facts(w.format).integers else 0.0)
    rounded = 0.0 if w.format is Format.BF16 else HALF_ULP_BF16 * (np.abs(x) @ np.abs(w.values).T)
    return sums + (rounded if len(x) >= 16 else 0.0) + 1e-30


def fixed_point(w: Weights, x: np.ndarray) -> np.ndarray:
    """Half a unit, 2^-23 of the largest of 16 activations, for each code, and as much for sums of 16 in float32."""
    padded = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % 16)))
    largest = np.repeat(padded.reshape(len(x), -1, 16).max(-1), 16, -1)[:, : x.shape[1]]
    return 2.0**-22 * (largest @ w.scaled.T)


@pytest.mark.parametrize(("form", "group"), CASES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (37, 200), (96, 576), (1, 16)])
def test_linear_matches_float64(pool, form, group, rows, columns):
    w = random_weights(form, group, rows, columns, seed=rows)
    packed = Packed([w])
    for tokens in TOKENS:
        bits, x = activations(tokens, columns, seed=tokens)
        got = product(pool, packed, bits, rows)
        off = np.abs(got - x @ w.values.T)
        assert (off <= sum_bound(w, x)).all(), (tokens, (off / sum_bound(w, x)).max())


# Groups that neither divide a tile's 32 columns nor are divided by them.
ODD_GROUPS = [(Format.INT4_F16, 48), (Format.INT8_F32, 80), (Format.UINT4_F32, 96), (Format.FP8_ROW, 112)]


@pytest.mark.parametrize(("form", "group"), ODD_GROUPS, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("columns", [48, 200, 576])
def test_groups_of_any_multiple_of_sixteen(pool, form, group, columns):
    w = random_weights(form, group, 37, columns, seed=columns)
    packed = Packed([w])
    for tokens in TOKENS:
        bits, x = activations(tokens, columns, seed=tokens)
        off = np.abs(product(pool, packed, bits, 37) - x @ w.values.T)
        assert (off <= sum_bound(w, x)).all(), (tokens, (off / sum_bound(w, x)).max())


def test_every_code_of_e4m3(pool):
    """A row for each code, whose sum is of that code alone."""
    values = np.arange(256, dtype=np.uint8)[:, None].repeat(32, 1)
    w = Weights(Format.FP8_ROW, 0, values, values, {"codes": values, "scales": np.ones((256, 1), np.float32)})
    one = np.zeros((1, 32), np.uint16)
    one[0, 5] = bf16_bits(np.ones(1))[0]
    got = product(pool, Packed([w]), one, 256)
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = (
            np.nan if code & 127 == 127 else (8 + fraction if exponent else fraction) * 2.0 ** (max(exponent, 1) - 10)
        )
        np.testing.assert_array_equal(got[0, code], np.float32(-size if code & 128 else size), err_msg=f"{code:#x}")


@pytest.mark.parametrize("scale", [1.0, 0.0123, 1.0 + 2.0**-9, -0.0123, 0.0, 1e-30, 1e36, np.nan])
def test_every_code_of_e4m3_times_a_scale_of_all_rows(pool, scale):
    """For few tokens and for many, whose weights are rounded to bfloat16. Each token's only activation is 1; those of 0
    times a product that is not finite are NaN."""
    codes = np.arange(256, dtype=np.uint8)[:, None].repeat(64, 1)
    scales = np.array([[scale, 2.0]] * 2, np.float32)  # of rows 0 to 127 and 128 to 255, and of two groups of columns
    w = Weights(Format.FP8_PANEL, 32, codes, codes, {"codes": codes, "scales": scales}, scale_rows=128)
    exact = e4m3_values(codes) * scales[:1].astype(np.float64).repeat(32, 1)
    finite = (np.abs(exact) < 3.38e38).all(1)  # bfloat16 ends at 3.39e38
    for tokens in (1, 5, 64, 128):
        got = product(pool, Packed([w]), np.tile(bf16_bits(np.eye(64)), (2, 1))[:tokens], 256).T
        want = np.tile(exact, (1, 2))[finite, :tokens]
        assert (np.abs(got[finite] - want) <= (HALF_ULP_BF16 if tokens >= 16 else 2.0**-23) * np.abs(want)).all()
        assert (np.sign(got[finite]) == np.sign(want)).all()
        assert not np.isfinite(got[~finite]).any()


@pytest.mark.parametrize("apart", [0, 1], ids=["alike", "of-each-row"])
def test_every_scale_of_e8m0(pool, apart):
    """With few tokens and many. 2^-127 counts as zero (scales.h), and so do subnormal weights; 255 is NaN."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (16, 2))
    values = e2m1_values(codes)
    for scales in np.arange(256).reshape(16, 16) if apart else np.arange(256).repeat(16).reshape(256, 16):
        stored = {"codes": codes, "scales": scales[:, None].astype(np.uint8)}
        packed = Packed([Weights(Format.MXFP4, 32, values, values, stored)])
        exact = np.where(scales > 0, 2.0 ** (scales - 127.0), 0)[:, None] * values
        exact[scales == 255] = np.nan
        finite = (np.abs(exact) <= np.finfo(np.float32).max).all(1)
        for batch in (4, 16):
            got = product(pool, packed, bf16_bits(np.eye(32)[:batch]), 16).T.astype(np.float64)
            off, most = np.abs(got - exact[:, :batch])[finite], np.where(np.abs(exact) < 2.0**-126, 2.0**-126, 0)
            assert (off <= most[finite, :batch]).all()
            assert np.isnan(got[scales == 255]).all()


@pytest.mark.parametrize(("form", "group"), CASES, ids=lambda v: getattr(v, "name", v))
def test_a_tokens_result_does_not_depend_on_its_batch_or_on_nodes(pool, form, group):
    w = random_weights(form, group, 96, 320, seed=2)
    bits, _ = activations(13, 320, seed=3)
    first, end = 1, other_way_from(pool.isa, form)
    while first <= 13:  # all batches that are multiplied alike
        most = min(end - 1, 13)
        want = product(pool, Packed([w]), bits[:most], 96)
        for tokens in range(first, most):
            np.testing.assert_array_equal(product(pool, Packed([w]), bits[:tokens], 96), want[:tokens])
            last = product(pool, Packed([w]), bits[most - tokens : most], 96)
            np.testing.assert_array_equal(last, want[most - tokens :])
        np.testing.assert_array_equal(product(pool, Packed([w], pieces=2), bits[:most], 96), want)
        first, end = end, 32
        if pool.isa in ("amx", "scalar-tiles"):
            break  # tiles add up in another order


class FormatKernels(ctypes.Structure):
    """proa_format_kernels of tables.h: integer products up to digit_rows, matrix tiles from tile_rows on, weights
    expanded once for all rows from wide_rows on. 0: none of that kind."""

    _fields_ = (("digit_rows", ctypes.c_int32), ("tile_rows", ctypes.c_int32), ("wide_rows", ctypes.c_int32))


def other_way_from(isa: str, form: Format) -> int:
    """The number of tokens from which on an instruction set uses another algorithm."""
    parameters = ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(FormatKernels)
    kernels = FormatKernels()
    library().bind({"proa_get_format_kernels": parameters}).proa_get_format_kernels(isa.encode(), form, kernels)
    if kernels.tile_rows:
        return kernels.tile_rows
    return kernels.digit_rows + 1 if kernels.digit_rows else kernels.wide_rows


INTEGERS = [case for case in CASES if facts(case[0]).integers]


@pytest.mark.parametrize(("form", "group"), INTEGERS, ids=lambda v: getattr(v, "name", v))
def test_every_code_of_integers(pool, form, group):
    columns = 256
    w = random_weights(form, group, 32, columns, seed=1, every_code=True)
    bits = bf16_bits(np.eye(columns))
    got = np.concatenate([product(pool, Packed([w]), bits[i : i + 2], 32) for i in range(0, columns, 2)]).T
    assert (np.abs(got - w.values) <= 2.0**-21 * w.scaled + 1e-30).all()


@pytest.mark.parametrize(("form", "group"), CASES, ids=lambda v: getattr(v, "name", v))
def test_activations_of_any_size(pool, form, group):
    """Neighbours that differ by up to 2^40, all small, all large, all zero."""
    rng = np.random.default_rng(7)
    w = random_weights(form, group, 37, 200, seed=7)
    packed = Packed([w])
    for least, most in ((-20, 20), (-60, -50), (50, 60), (-2, 2)):
        sizes = 2.0 ** rng.integers(least, most, (4, 200))
        bits = bf16_bits(rng.standard_normal((4, 200)) * sizes * (rng.random((4, 200)) < 0.7))
        bits[3] = 0
        x = bf16_values(bits)
        for tokens in (1, 4):
            got = product(pool, packed, bits[4 - tokens :], 37)
            off = np.abs(got - x[4 - tokens :] @ w.values.T)
            assert (off <= sum_bound(w, x[4 - tokens :])).all(), (least, tokens)
            assert (got[-1] == 0).all()


@pytest.mark.parametrize(("form", "group"), [(Format.INT8_F32, 0), (Format.INT4_F32, 128)])
def test_small_activations_beside_large_ones_are_exact(pool, form, group):
    """bfloat16 values down to 2^-14 of their largest neighbour are exact: 255 / 128 needs every digit's carry."""
    codes = np.eye(128)
    arrays = {"codes": (codes + (8 if form is Format.INT4_F32 else 0)).astype(np.uint8)}
    arrays["scales"] = np.ones((128, 1), np.float32)
    packed = Packed([Weights(form, group, codes, codes, arrays)])
    exact = (128 + np.arange(128)) * 2.0 ** -np.arange(15)[:, None] * np.where(np.arange(128) % 3, 1, -1)
    exact[:, ::16] = 255 * np.where(np.arange(8) % 2, 1, -1)
    bits = bf16_bits(exact)
    np.testing.assert_array_equal(bf16_values(bits), exact)
    for row in range(15):
        np.testing.assert_array_equal(product(pool, packed, bits[row : row + 1], 128), exact[row : row + 1])


@pytest.mark.parametrize(("form", "group"), CASES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("strange", [0x7F80, 0xFF80, 0x7FC0], ids=["inf", "-inf", "nan"])
def test_non_finite_values_affect_only_their_own_token(pool, form, group, strange):
    w = random_weights(form, group, 16, 64, seed=4)
    bits, _ = activations(3, 64, seed=4)
    want = product(pool, Packed([w]), bits, 16)
    bits[1, 37] = strange
    got = product(pool, Packed([w]), bits, 16)
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
    assert not np.isfinite(got[1][w.values[:, 37] != 0]).any()


def test_bias_and_bfloat16_output(pool):
    w = random_weights(Format.BF16, 0, 37, 64, seed=0)
    bits, _ = activations(3, 64, seed=1)
    bias = np.arange(37, dtype=np.float32)
    packed = Packed([w])
    wide = product(pool, packed, bits, 37, bias)
    np.testing.assert_allclose(wide - product(pool, packed, bits, 37), np.tile(bias, (3, 1)), atol=1e-4)
    y = np.zeros((3, 37), np.uint16)
    linear(
        pool, packed.matrix, Rows(bits.ctypes.data, 64), Rows(y.ctypes.data, 37), 3, outputs=37, bias=bias.ctypes.data
    )
    np.testing.assert_array_equal(y, bf16_bits(wide))


@pytest.mark.parametrize("name", [*gguf_kept()])
def test_gguf_blocks_keep_their_values(pool, name):
    type_, form = Stored[name], kept_form([name], 768)
    blocks = random_blocks(name, 35, 768, np.random.default_rng(type_))
    exact = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float64)
    packed = pack_blocks(pool, type_, blocks, layout(form.format, 35, 768, form.group))
    assert form.format is not Format.BF16
    identity = bf16_bits(np.eye(768))
    for first in range(0, 768, 15):  # few tokens: nothing is rounded
        got = product(pool, packed, identity[first : first + 15], 35).T
        np.testing.assert_allclose(got, exact[:, first : first + 15], rtol=2.0**-21, atol=2.0**-24 * 64)


# ---- experts


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def activate(kind: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    match kind:
        case Activation.SILU:
            return gate * sigmoid(gate) * up
        case Activation.CLAMPED_SWIGLU:
            g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
            return (u + 1) * g * sigmoid(1.702 * g)
    return np.maximum(gate, 0) ** 2


class Layer:
    """Random experts of one format with their exact values."""

    def __init__(self, form, group, experts, hidden, width, kind=Activation.SILU, biased=False, pieces=1):
        self.kind, self.width, self.hidden = kind, width, hidden
        make = [[random_weights(form, group, r, c, seed=9 * e + i) for e in range(experts)]
                for i, (r, c) in enumerate([(width, hidden), (width, hidden), (hidden, width)])]  # fmt: skip
        self.gate, self.up, self.down = make
        rng = np.random.default_rng(5)
        panels = -(-width // 16)
        self.gate_bias = rng.standard_normal((experts, width)).astype(np.float32) * biased
        self.up_bias = rng.standard_normal((experts, width)).astype(np.float32) * biased
        self.down_bias = np.zeros((experts, -(-hidden // 16) * 16), np.float32)
        self.down_bias[:, :hidden] = rng.standard_normal((experts, hidden)) * biased
        pair = np.zeros((experts, panels, 2, 16), np.float32)
        for part, bias in enumerate((self.gate_bias, self.up_bias)):
            padded = np.pad(bias, ((0, 0), (0, panels * 16 - width)))
            pair[:, :, part] = padded.reshape(experts, panels, 16)
        self.fused_bias = pair if kind is not Activation.RELU2 else np.ascontiguousarray(pair[:, :, 0])
        first = Packed(self.gate, pieces, None if kind is Activation.RELU2 else self.up)
        self._packed = first, Packed(self.down, pieces)
        bias = {"gate_bias": self.fused_bias.ctypes.data, "down_bias": self.down_bias.ctypes.data} if biased else {}
        self.experts = Experts(first.matrix, self._packed[1].matrix, kind, limit=7.0, **bias)

    def run(self, pool, bits, ids, weights):
        y = np.full((len(bits), self.hidden), np.nan, np.float32)
        x, out = Rows(bits.ctypes.data, bits.shape[1]), Rows(y.ctypes.data, self.hidden, True)
        at = {"ids": ids.ctypes.data, "weights": weights.ctypes.data}
        moe(pool, self.experts, x, out, len(bits), top_k=ids.shape[1], **at)
        return y

    def exact(self, x, ids, weights) -> tuple[np.ndarray, np.ndarray]:
        """The result in float64, and the error bound for float32 sums and bfloat16 activations in between."""
        y, bound = np.zeros((len(x), self.hidden)), np.zeros((len(x), self.hidden))
        for e in range(len(self.gate)):
            rows, choice = np.nonzero(ids == e)
            if not len(rows):
                continue
            many = np.repeat(x[rows], 1, 0)
            g = many @ self.gate[e].values.T + self.gate_bias[e]
            u = many @ self.up[e].values.T + self.up_bias[e]
            dg, du = (self._slack(w, many) for w in (self.gate[e], self.up[e]))
            h = activate(self.kind, g, u)
            dh = np.zeros_like(h)
            for a in (-1, 1):
                for b in (-1, 1):  # monotone pieces: corners bound the activation's change, doubled for its curvature
                    dh = np.maximum(dh, 2 * np.abs(activate(self.kind, g + a * dg, u + b * du) - h))
            dh += np.abs(h) * (2 * HALF_ULP_BF16 + 2.0**-19) + 1e-6
            d = self.down[e]
            part = h @ d.values.T + self.down_bias[e, : self.hidden]
            slack = dh @ np.abs(d.values).T + self._slack(d, h)
            np.add.at(y, rows, weights[rows, choice, None] * part)
            np.add.at(bound, rows, np.abs(weights[rows, choice, None]) * (slack + 2.0**-22 * np.abs(part)))
        return y, bound + 2.0**-20 * np.abs(y)

    @staticmethod
    def _slack(w, x):
        terms = w.values.shape[1] + 4 * w.layout.padded_columns // (w.group or w.values.shape[1]) + 8
        rounded = 0.0 if w.format is Format.BF16 else HALF_ULP_BF16
        return terms * 2.0**-24 * (np.abs(x) @ w.scaled.T) + rounded * (np.abs(x) @ np.abs(w.values).T)


def routing(tokens: int, experts: int, top_k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    return ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32)


EXPERT_TOKENS = (1, 2, 7, 40, 300, 700)  # the last: more than a group of tokens


def check(pool, layer, bits, x, ids, weights):
    exact, bound = layer.exact(x, ids, weights)
    off = np.abs(layer.run(pool, bits, ids, weights) - exact)
    assert (off <= bound).all(), (off / bound).max()


@pytest.mark.parametrize(("form", "group"), CASES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parts("number", len(EXPERT_TOKENS))
def test_experts_match_float64(pool, form, group, number):
    layer = Layer(form, group, experts=5, hidden=160, width=72)
    for tokens in EXPERT_TOKENS if number is None else EXPERT_TOKENS[number : number + 1]:
        bits, x = activations(tokens, 160, seed=tokens)
        check(pool, layer, bits, x, *routing(tokens, 5, 3, seed=tokens))


@pytest.mark.parametrize("kind", list(Activation), ids=lambda k: k.name)
@pytest.mark.parametrize("biased", [False, True])
def test_activations_and_biases(pool, kind, biased):
    layer = Layer(Format.UINT4_F16, 32, 3, hidden=96, width=40, kind=kind, biased=biased)
    for tokens in (1, 6):
        bits, x = activations(tokens, 96, seed=tokens)
        check(pool, layer, bits, x, *routing(tokens, 3, 2, seed=tokens))


@pytest.mark.parametrize("kind", list(Activation), ids=lambda k: k.name)
def test_nan_propagates_through_every_activation(pool, kind):
    layer = Layer(Format.INT4_F16, 32, 3, hidden=96, width=40, kind=kind)
    for tokens in (1, 6, 40):
        bits, _ = activations(tokens, 96, seed=tokens)
        bits[::2, 5] = 0x7FC0
        y = layer.run(pool, bits, *routing(tokens, 3, 2, seed=tokens))
        assert np.isnan(y[::2]).all()
        assert np.isfinite(y[1::2]).all()


@pytest.mark.parametrize(
    "ids",
    [np.zeros((20, 1), np.int32), np.full((3, 2), -1, np.int32), np.array([[0, -1], [-1, 3], [3, 3]], np.int32)],
    ids=["all on one", "no expert", "some without an expert, one twice"],
)
def test_uneven_routing(pool, ids):
    layer = Layer(Format.BF16, 0, 4, hidden=64, width=17)
    bits, x = activations(len(ids), 64, seed=0)
    check(pool, layer, bits, x, ids, np.full(ids.shape, 0.5, np.float32))


def test_one_row_experts(pool):
    layer = Layer(Format.BF16, 0, 3, hidden=1, width=1)
    bits, x = activations(4, 1, seed=0)
    check(pool, layer, bits, x, *routing(4, 3, 2, seed=1))


def test_same_bits_for_any_threads_and_nodes():
    bits, _ = activations(50, 160, seed=1)
    ids, weights = routing(50, 6, 3, seed=2)
    results = []
    for workers, pieces in ((0, 1), (1, 1), (3, 1), (1, 2), (2, 3), (3, 4), (1, 8)):
        layer = Layer(Format.INT4_F16, 32, 6, hidden=160, width=144, pieces=pieces)
        teams = [[0] * workers] + [[] for _ in range(pieces - 1)]
        with Pool(teams, pin=False) as pool:
            results.append(layer.run(pool, bits, ids, weights))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


# ---- what must be refused


def test_ids_out_of_range_are_errors(pool):
    layer = Layer(Format.BF16, 0, 4, hidden=64, width=16)
    bits, _ = activations(2, 64, seed=0)
    for bad in (4, -2, 2**31 - 1):
        with pytest.raises(ValueError, match=f"Expert id {bad} does not exist: there are 4"):
            layer.run(pool, bits, np.full((2, 1), bad, np.int32), np.ones((2, 1), np.float32))
    check(pool, layer, bits, bf16_values(bits), *routing(2, 4, 1, seed=0))  # the pool still works


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((99, 16, 16, 0), "no weight format 99"),
        ((Format.BF16, 0, 16, 0), "outside of 1 x 1"),
        ((Format.BF16, 16, 16, 32), "Groups of 32"),
        ((Format.INT4_F16, 16, 64, 24), "Groups of 24"),
        ((Format.NVFP4, 16, 64, 32), "Groups of 32"),
        ((Format.BF16, 2**30, 16, 0), "outside of"),
    ],
)
def test_layouts_that_do_not_exist(arguments, text):
    with pytest.raises(ValueError, match=text):
        layout(*arguments)


def test_wrong_buffers_are_errors(pool):
    w = random_weights(Format.BF16, 0, 32, 64, seed=0)
    packed = Packed([w])
    bits, _ = activations(2, 64, seed=0)
    y = np.zeros((2, 32), np.float32)
    good = Rows(bits.ctypes.data, 64), Rows(y.ctypes.data, 32, True)
    for x, out, outputs, text in [
        (Rows(bits.ctypes.data, 63), good[1], 32, "The stride of x is 63 values, but its rows have 64"),
        (good[0], Rows(y.ctypes.data, 31, True), 32, "The stride of y is 31 values, but its rows have 32"),
        (Rows(0, 64), good[1], 32, "The pointer to x is null"),
        (good[0], good[1], 33, "outputs must be between"),
    ]:
        with pytest.raises(ValueError, match=text):
            linear(pool, packed.matrix, x, out, 2, outputs=outputs)


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (Piece(0, 4096 + 32, 8192, 8192), "aligned to 64"),
        (Piece(0, 4096, 8192, 4095), "too small"),
        (Piece(0, 0, 8192, 8192), "aligned to 64"),
        (Piece(1, 4096, 8192, 8192), "all panels in order"),
        (Piece(0, 4096, 2048, 1 << 20), "must not overlap"),
    ],
)
def test_memory_that_cannot_hold_the_weights(piece, text):
    with pytest.raises(ValueError, match=text):
        Matrix(layout(Format.BF16, 32, 64), [piece], count=2)


def test_codes_and_scales_that_the_format_does_not_have():
    w = random_weights(Format.INT4_F16, 32, 16, 64, seed=0)
    w.arrays["codes"][3, 3] = 16
    with pytest.raises(ValueError, match="does not fit in 4 bits"):
        Packed([w])
    w = random_weights(Format.NVFP4, 16, 16, 64, seed=0)
    w.arrays["scales"][0, 1] = 0x80
    with pytest.raises(ValueError, match="negative or NaN"):
        Packed([w])
    w = random_weights(Format.INT4_F16, 32, 16, 64, seed=0)
    del w.arrays["scales"]
    with pytest.raises(ValueError, match="needs scales"):
        Packed([w])
