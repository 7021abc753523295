"""Experts of every packed format on the GPU against float64, from the bytes that the CPU's kernels read.

For few pairs weights are not rounded; on the tensor cores they are, once, to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from have_gpu import HAVE_GPU
from ops.triton_bounds import EPS32, assert_within, poisoned, rand, stored
from ops.triton_layers import capability_of
from packing import CASES, Packed, Weights, random_weights
from proa.native.formats import Form, Format, facts
from proa.ops.residency import ExpertShape
from proa.ops.sizes import BLOCK_TOKENS
from proa.ops.triton import experts_few, experts_grouped
from proa.ops.triton.expert_tiles import tile_of
from proa.ops.triton.panels_coded import MOST_ROWS, coded_columns

FORMS = [Form(*case) for case in CASES]
BF16_ROUNDING = 2.0**-8 * 1.01  # half a unit in the last of 8 places


def names(form: Form) -> str:
    return form.format.name


class Downs:
    """Experts with only down: [rows, columns] matrices of one format."""

    def __init__(self, stack: list[Weights], device: torch.device) -> None:
        self.stack = stack
        rows, columns = stack[0].values.shape
        self.shape = ExpertShape(rows, columns, down_form=Form(stack[0].format, stack[0].group))
        self._packed = Packed(stack)  # on a CPU the kernels read this memory itself
        data = torch.frombuffer(self._packed.memory, dtype=torch.uint8)
        self._bytes = data.to(device)
        self.address = self._bytes.data_ptr() + torch.arange(len(stack)) * self._packed.layout.matrix_bytes
        self.device = device

    def products(self, x: Tensor, ids: Tensor, block_tokens: int) -> Tensor:
        """float32 [pairs, rows] of x [pairs, columns] and experts ids int64 [pairs]; block_tokens 0: pair by pair."""
        pairs, address = len(ids), self.address[ids].to(self.device)[:, None]
        x, out = x.to(self.device), poisoned(pairs, self.shape.hidden, dtype=torch.float32).to(self.device)
        if block_tokens == 0:
            experts_few.multiply_pairs(x, address, self.shape, out, up=False)
            return out
        by = experts_grouped.groups(pairs, len(self.stack), self.device)
        experts_grouped.group(ids.int()[:, None].to(self.device), len(self.stack), block_tokens, by)
        tile = tile_of(self.shape.down, block_tokens, capability_of(self.device))
        experts_grouped.multiply_blocks(x, address, by, tile, self.shape, out, up=False)
        return out


@dataclass
class Expected:
    """Products in float64, and a kernel's error bound."""

    y: Tensor
    bound: Tensor


def expected(stack: list[Weights], x: Tensor, ids: Tensor, rounded: bool) -> Expected:
    x, columns = x.cpu().double(), x.shape[1]
    y, bound = (torch.zeros(len(ids), len(stack[0].values), dtype=torch.float64) for _ in range(2))
    for e, weights in enumerate(stack):
        values, sizes = torch.from_numpy(weights.values).T, torch.from_numpy(weights.scaled).T
        mine = x[ids == e]
        y[ids == e] = mine @ values
        error = mine.abs() @ sizes * (columns + 8) * EPS32
        if rounded:
            error += mine.abs() @ values.abs() * BF16_ROUNDING
        bound[ids == e] = error
    return Expected(y, bound)


def rounds(weights: Weights, block_tokens: int) -> bool:
    """True if a weight times its scale is rounded to bfloat16."""
    exact = block_tokens <= MOST_ROWS and coded_columns(weights.layout) is not None
    return block_tokens > 0 and weights.format is not Format.BF16 and not exact


def check(stack: list[Weights], x: Tensor, ids: Tensor, block_tokens: int, device: torch.device) -> None:
    downs = Downs(stack, device)
    got, want = downs.products(x, ids, block_tokens), expected(stack, x, ids, rounds(stack[0], block_tokens))
    assert_within(got, want.y, want.bound)
    assert torch.equal(got, downs.products(x, ids, block_tokens))


SIZES, BLOCKS = [(40, 150), (17, 544), (17, 192)], [0, 16, 64]
EVERYWHERE = [(size, tokens) for size in SIZES for tokens in BLOCKS]
SOME = [(SIZES[0], 0), (SIZES[0], 16), (SIZES[1], 0), (SIZES[1], 64), (SIZES[2], 16)]  # the interpreter takes long


@pytest.mark.one_table
@pytest.mark.parametrize("form", FORMS, ids=names)
@pytest.mark.parametrize(("size", "block_tokens"), EVERYWHERE if HAVE_GPU else SOME, ids=str)
def test_products(
    form: Form, size: tuple[int, int], block_tokens: int, rng: torch.Generator, device: torch.device
) -> None:
    stack = [random_weights(form.format, form.group, *size, seed=e) for e in range(2)]
    check(stack, rand(rng, 2, size[1]), torch.tensor([1, 0]), block_tokens, device)


SCALED = [form for form in FORMS if form.format > Format.FP16]
E4M3 = [form for form in FORMS if form.format in (Format.FP8_ROW, Format.FP8_PANEL, Format.MXFP8)]


@pytest.mark.one_table
@pytest.mark.parametrize("block_tokens", [0, 16])
@pytest.mark.parametrize("form", SCALED, ids=names)
def test_every_code_alone(form: Form, block_tokens: int, device: torch.device) -> None:
    """Every code at every place of a word, without other terms that could hide an error."""
    places = facts(form.format).unit_values
    rows = 256 if places == 4 else 64  # as many as there are codes, or more
    weights = random_weights(form.format, form.group, rows, 256, seed=1, every_code=True)
    x, ids = torch.eye(256)[:places].bfloat16(), torch.zeros(places, dtype=torch.int64)
    got = Downs([weights], device).products(x, ids, block_tokens)
    values, sizes = (torch.from_numpy(a)[:, :places].T for a in (weights.values, weights.scaled))
    assert_within(
        got, values, sizes * 6 * EPS32 + (values.abs() * BF16_ROUNDING if rounds(weights, block_tokens) else 0)
    )


@pytest.mark.one_table
@pytest.mark.parametrize("block_tokens", [0, 16, 64])
@pytest.mark.parametrize("form", E4M3, ids=names)
def test_nan_codes(form: Form, block_tokens: int, rng: torch.Generator, device: torch.device) -> None:
    """Their rows are NaN, all others are right."""
    good = random_weights(form.format, form.group, 40, 256, seed=1)
    bad = replace(good, arrays={**good.arrays, "codes": good.arrays["codes"].copy()})
    spoilt = {3: 0x7F, 17: 0xFF, 18: 0x7F, 32: 0xFF}
    for row, code in spoilt.items():
        bad.arrays["codes"][row, 5 * row % 256] = code
    x, ids = rand(rng, 2, 256), torch.zeros(2, dtype=torch.int64)
    got, want = Downs([bad], device).products(x, ids, block_tokens), expected([good], x, ids, block_tokens > 0)
    assert got[:, list(spoilt)].isnan().all()
    others = [row for row in range(40) if row not in spoilt]
    assert_within(got[:, others], want.y[:, others], want.bound[:, others])


@pytest.mark.parametrize("block_tokens", [0, 16, 64])
@pytest.mark.parametrize("group", [16, 48, 256])
@pytest.mark.parametrize("form", [Format.FP8_ROW, Format.INT4_F32, Format.UINT4_BF16], ids=str)
def test_groups_of_any_size(
    form: Format, group: int, block_tokens: int, rng: torch.Generator, device: torch.device
) -> None:
    stack = [random_weights(form, group, 20, 300, seed=2)]
    check(stack, rand(rng, 2, 300), torch.tensor([0, 0]), block_tokens, device)


@pytest.mark.parametrize("form", [Form(Format.INT4_F16, 32), Form(Format.FP8_PANEL, 128)], ids=names)
def test_rows_that_are_not_aligned(form: Form, rng: torch.Generator, device: torch.device) -> None:
    stack = [random_weights(form.format, form.group, 20, 256, seed=2)]
    wide = rand(rng, 3, 261).to(device)
    for x in (wide[:, 1:257], wide[:, 4:260], wide[:2, :256]):
        check(stack, x, torch.zeros(len(x), dtype=torch.int64), 0, device)


@pytest.mark.one_table
@pytest.mark.parametrize("block_tokens", [0, 16])
@pytest.mark.parametrize(
    "form",
    [Form(of, 0) for of in (Format.UINT4_F16, Format.INT4_F16, Format.INT4_BF16, Format.INT8_F32, Format.FP8_PANEL)],
    ids=names,
)
def test_one_group(form: Form, block_tokens: int, rng: torch.Generator, device: torch.device) -> None:
    stack = [random_weights(form.format, 0, 20, 300, seed=2)]
    check(stack, rand(rng, 2, 300), torch.tensor([0, 0]), block_tokens, device)


@pytest.mark.one_table
@pytest.mark.parametrize("block_tokens", [0, 16, 64])
@pytest.mark.parametrize(
    "form",
    [FORMS[i] for i in (Format.FP16, Format.FP8_PANEL, Format.INT4_F16, Format.MXFP4, Format.Q6_K)]
    + [Form(Format.FP8_PANEL, 0)],
    ids=lambda form: f"{form.format.name} {form.group}",
)
def test_gate_and_up(form: Form, block_tokens: int, rng: torch.Generator, device: torch.device) -> None:
    """Their panels alternate; the last ones are padded."""
    width, hidden = 40, 288
    gate, up = ([random_weights(form.format, form.group, width, hidden, seed=s)] for s in (1, 2))
    packed, shape = Packed(gate, paired=up), ExpertShape(hidden, width, form)
    data = torch.frombuffer(packed.memory, dtype=torch.uint8).to(device)
    x, ids = rand(rng, 3, hidden), torch.zeros(3, dtype=torch.int64)
    address, h = torch.full((3, 1), data.data_ptr()), poisoned(3, width)
    address, h, given = address.to(device), h.to(device), x.to(device)
    if block_tokens == 0:
        experts_few.multiply_pairs(given, address, shape, h, up=True)
    else:
        by = experts_grouped.groups(3, 1, device)
        experts_grouped.group(ids.int()[:, None].to(device), 1, block_tokens, by)
        tile = tile_of(shape.up, block_tokens, capability_of(device))
        experts_grouped.multiply_blocks(given, address, by, tile, shape, h, up=True)
    a, b = (expected(part, x, ids, block_tokens > 0) for part in (gate, up))
    want = a.y * a.y.sigmoid() * b.y
    error = 1.15 * a.bound * (b.y.abs() + b.bound) + a.y.abs() * b.bound  # the slope of silu is at most 1.1
    error += (a.y * b.y).abs() * (a.y.abs() + 16) * EPS32  # exp errs by its argument's rounding
    assert_within(h, want, error + stored(want.abs() + error))


@pytest.mark.gpu
@pytest.mark.parametrize("block_tokens", [0, *BLOCK_TOKENS])
@pytest.mark.parametrize("form", FORMS, ids=names)
@pytest.mark.parametrize("size", [(2048, 768), (768, 2048), (720, 2880)], ids=str)
def test_shapes_of_models(
    form: Form, size: tuple[int, int], block_tokens: int, rng: torch.Generator, device: torch.device
) -> None:
    stack = [random_weights(form.format, form.group, *size, seed=e) for e in range(3)]
    for pairs in (1, 8, 200):
        check(stack, rand(rng, pairs, size[1]), torch.randint(0, 3, (pairs,), generator=rng), block_tokens, device)
