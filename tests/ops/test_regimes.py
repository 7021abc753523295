"""In the decode and prompt regimes, whose kernels are fixed, a row has the same bits whatever other rows a step has: on
every instruction set, with every packed format, for experts and attention."""

from __future__ import annotations

import numpy as np
import pytest

from packing import CASES, Packed, bf16_bits, bf16_values, random_weights
from proa.native.pool import Pool, select_isa
from proa.native.program import Cache, Program, Regime
from proa.native.weights import Activation, Experts, Rows

ISAS = ["scalar", "scalar-tiles", "avx2", "avx512", "avx512-bf16", "amx"]
FIXED = [Regime.DECODE, Regime.PROMPT]
ROWS = 70
PARTS = [(0, 1), (3, 4), (5, 7), (10, 15), (20, 36), (30, 63), (0, 69)]  # of these: every kind of block and remainder


@pytest.fixture(scope="module", params=ISAS)
def pool(request):
    try:
        select_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    with Pool([[0], []], isa=request.param, pin=False) as pool:
        yield pool


def random_rows(rows: int, columns: int, seed: int) -> np.ndarray:
    return bf16_bits(np.random.default_rng(seed).standard_normal((rows, columns)))


def linear(pool: Pool, packed: Packed, x: np.ndarray, outputs: int, regime: Regime) -> np.ndarray:
    y = np.zeros((len(x), outputs), np.float32)
    program = Program(pool, len(x), 1, 1)
    program.set_regime(regime)
    program.add_linear(packed.matrix, Rows(x.ctypes.data, x.shape[1]), Rows(y.ctypes.data, outputs, True), outputs)
    program.run(0, 1, len(x))
    return y


@pytest.mark.parametrize(("form", "group"), CASES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("regime", FIXED)
def test_rows_of_a_product_do_not_depend_on_their_number(pool, form, group, regime):
    weights = random_weights(form, group, 37, 256, seed=1)
    packed, x = Packed([weights]), random_rows(ROWS, 256, seed=2)
    whole = linear(pool, packed, x, 37, regime)
    for first, end in PARTS:
        np.testing.assert_array_equal(linear(pool, packed, x[first:end], 37, regime), whole[first:end])
    size = np.abs(bf16_values(x)) @ weights.scaled.T
    exact = bf16_values(x) @ weights.values.T
    assert (np.abs(whole - exact) <= 2.0**-8 * size).all()  # at most a weight rounded once


@pytest.mark.parametrize(("form", "group"), CASES, ids=lambda v: getattr(v, "name", v))
@pytest.mark.parametrize("regime", FIXED)
def test_a_tokens_experts_do_not_depend_on_other_tokens(pool, form, group, regime):
    count, top_k, hidden, width = 5, 2, 256, 256
    gates, ups = ([random_weights(form, group, width, hidden, seed=s + e) for e in range(count)] for s in (10, 20))
    downs = [random_weights(form, group, hidden, width, seed=30 + e) for e in range(count)]
    up, down = Packed(gates, paired=ups), Packed(downs)
    experts = Experts(up.matrix, down.matrix, Activation.SILU)
    rng = np.random.default_rng(3)
    x = random_rows(ROWS, hidden, seed=4)
    ids = np.array([rng.choice(count, top_k, replace=False) for _ in range(ROWS)], np.int32)
    ids[20:60, 0], ids[20:60, 1] = 1, 3  # experts of many tokens beside those of few
    shares = rng.random((ROWS, top_k)).astype(np.float32)

    def compute(first: int, end: int) -> np.ndarray:
        y = np.zeros((end - first, hidden), np.uint16)
        rows, here, weights = (np.ascontiguousarray(a[first:end]) for a in (x, ids, shares))
        program = Program(pool, len(rows), 1, 1)
        program.set_regime(regime)
        program.add_moe(
            experts, Rows(rows.ctypes.data, hidden), Rows(y.ctypes.data, hidden), here.ctypes.data, weights.ctypes.data,
            top_k,
        )  # fmt: skip
        program.run(0, 1, len(rows))
        return y

    whole = compute(0, ROWS)
    assert whole.any()
    for first, end in PARTS:
        np.testing.assert_array_equal(compute(first, end), whole[first:end])


class Attended:
    """One sequence's keys and values in pages of 16, in shuffled order, and its queries."""

    HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16

    def __init__(self, pool: Pool, tokens: int, seed: int, window: int | None) -> None:
        self.pool, self.tokens, self.window = pool, tokens, window
        width = self.KV_HEADS * self.DIM
        pages = -(-tokens // self.PAGE)
        self.keys, self.values = (random_rows(pages * self.PAGE, width, seed + i) for i in range(2))
        self.queries = random_rows(tokens, self.HEADS * self.DIM, seed + 2)
        self.table = np.random.default_rng(seed).permutation(pages).astype(np.int32)
        self.cache = Cache(
            self.keys.ctypes.data, self.values.ctypes.data, pages, self.PAGE, self.KV_HEADS, self.DIM, key_scale=1.0,
            value_scale=1.0,
        )  # fmt: skip

    def run(self, regime: Regime, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Run one step in which rows [first, end) of each span are a sequence of their own."""
        q = np.concatenate([self.queries[first:end] for first, end in spans])
        out = np.zeros_like(q)
        q_lens = np.array([end - first for first, end in spans], np.int32)
        kv_lens = np.array([end for _, end in spans], np.int32)
        table = np.tile(self.table, (len(spans), 1))
        program = Program(self.pool, len(q), len(spans), len(self.table))
        program.set_regime(regime)
        width = self.HEADS * self.DIM
        program.add_attention(
            self.cache, Rows(q.ctypes.data, width), Rows(out.ctypes.data, width), self.HEADS, 0.125, self.window
        )
        program.set_batch(
            len(spans), q_lens.ctypes.data, kv_lens.ctypes.data, 0, table.ctypes.data, len(self.table),
            len(self.table), self.PAGE,
        )  # fmt: skip
        program.run(0, 1, len(q))
        return np.split(out, np.cumsum(q_lens)[:-1])


@pytest.mark.parametrize("window", [None, 100, 300])
def test_attention_of_a_prompt_does_not_depend_on_where_it_is_cut(pool, window):
    case = Attended(pool, 420, seed=5, window=window)
    (whole,) = case.run(Regime.PROMPT, [(0, 420)])
    for cuts in ([1, 3, 128, 130, 257, 417, 419], [2, 4, 300], [16 * i for i in range(1, 26)]):
        ends = [*cuts, 420]
        for first, end in zip([0, *cuts], ends, strict=True):
            (part,) = case.run(Regime.PROMPT, [(first, end)])
            np.testing.assert_array_equal(part, whole[first:end], err_msg=f"{first} to {end}")
    together = case.run(Regime.PROMPT, [(0, 5), (5, 6), (6, 200), (200, 420)])
    np.testing.assert_array_equal(np.concatenate(together), whole)


@pytest.mark.parametrize("window", [None, 300])
def test_attention_in_decode_does_not_depend_on_other_sequences(pool, window):
    tokens = 3000 if pool.isa != "scalar-tiles" else 1500  # so long that one sequence's keys are split
    case = Attended(pool, tokens, seed=6, window=window)
    at = [tokens, 1, 17, 700, tokens - 1, 1025, 2, tokens - 300]
    together = case.run(Regime.DECODE, [(end - 1, end) for end in at * 4])
    for end, got in zip(at * 4, together, strict=True):
        (alone,) = case.run(Regime.DECODE, [(end - 1, end)])
        np.testing.assert_array_equal(got, alone, err_msg=f"{end}")


def test_unknown_regimes_are_refused(pool):
    with pytest.raises(ValueError, match="regime"):
        Program(pool, 1, 1, 1).set_regime(7)  # type: ignore[arg-type]
