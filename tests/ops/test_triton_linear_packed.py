"""Linear layers with every packed format against float64, from the bytes that the CPU's kernels read.

With one row weights are not rounded; with more they are, once, to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from packing import CASES, Packed, Weights, random_weights
from proa.native.formats import Form, Format, facts, layout
from proa.ops.triton import linear_packed
from proa.ops.triton.linear_packed import MOST_PROGRAMS, _grid, _tile, partial_floats
from proa.ops.triton.panels_coded import MOST_ROWS, coded_columns

FORMS = [Form(*case) for case in CASES]
BF16_ROUNDING = 2.0**-8 * 1.01  # half a unit in the last of 8 places


def names(form: Form) -> str:
    return form.format.name


@dataclass
class Map:
    """Weights on the device, and the workspace of calls; partial sums are initially NaN."""

    weights: Weights
    device: torch.device

    def __post_init__(self) -> None:
        packed = Packed([self.weights])
        self.of = packed.layout
        data = torch.frombuffer(packed.memory, dtype=torch.uint8).clone()
        self.panels = data.view(self.of.panels, self.of.panel_bytes).to(self.device)
        self.arrived = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=self.device)

    def __call__(self, x: Tensor, bias: Tensor | None, out: Tensor, least_rows: int = 1) -> Tensor:
        partial = poisoned(partial_floats(max(len(x), least_rows), self.of), dtype=torch.float32).to(self.device)
        linear_packed.linear_packed(x, self.panels, self.of, bias, out, partial, self.arrived, least_rows)
        assert not self.arrived.any(), "the next call would add up too early"
        return out


def check(weights: Weights, x: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
    run, shape = Map(weights, device), (len(x), len(weights.values))
    bias = bias if bias is None else bias.to(device)
    got, again = (run(x.to(device), bias, poisoned(*shape, dtype=dtype).to(device)) for _ in range(2))
    values, sizes = torch.from_numpy(weights.values).T, torch.from_numpy(weights.scaled).T
    wide, columns = x.double().cpu(), x.shape[1]
    offset = torch.zeros(shape[1], dtype=torch.float64) if bias is None else bias.double().cpu()
    want = wide @ values + offset
    bound = (wide.abs() @ sizes + offset.abs()) * (columns + 10) * EPS32
    exact = len(x) <= MOST_ROWS and coded_columns(weights.layout) is not None
    if len(x) > 1 and weights.format is not Format.BF16 and not exact:
        bound += wide.abs() @ values.abs() * BF16_ROUNDING
    assert_within(got, want, bound + stored(want.abs() + bound, dtype))
    assert torch.equal(got, again)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs share even the few columns of the tests."""
    monkeypatch.setattr(linear_packed, "_LEAST_STEPS", 1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_packed, "_LEAST_STEPS", 99)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("form", FORMS, ids=names)
def test_products(form: Form, tokens: int, rng: torch.Generator, device: torch.device) -> None:
    weights = random_weights(form.format, form.group, 40, 150, seed=tokens)
    assert partial_floats(tokens, weights.layout) == 0
    check(weights, rand(rng, tokens, 150), None, BF16, device)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("form", FORMS, ids=names)
def test_split_columns(form: Form, tokens: int, rng: torch.Generator, device: torch.device) -> None:
    weights = random_weights(form.format, form.group, 17, 544, seed=tokens)
    assert partial_floats(tokens, weights.layout) >= 2 * 17 * tokens
    check(weights, rand(rng, tokens, 544), None, BF16, device)


@pytest.mark.parametrize("form", FORMS, ids=names)
@pytest.mark.parametrize("size", [(5120, 2048), (2048, 4096), (512, 2880), (151936, 2048), (16, 1 << 17)], ids=str)
def test_parts_cover_all_columns(form: Form, size: tuple[int, int]) -> None:
    """Every part has some columns, and there are no more programs than arrival counters."""
    of = layout(form.format, *size, form.group)
    panel_lines = of.padded_columns // facts(of.format).unit_values
    for tokens in (1, 2, 16, 17, 64, 128):
        grid = _grid(tokens, of, _tile(tokens, of))
        assert (grid.splits - 1) * grid.lines < panel_lines <= grid.splits * grid.lines
        assert grid.lines % grid.stage == 0
        if grid.splits > 1:
            assert grid.blocks * grid.parts * grid.splits <= MOST_PROGRAMS
            assert grid.lines >= 4 * grid.stage


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 70, 130])
def test_every_block_of_rows(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    """Rows beyond the batch are neither read, where NaN stands, nor written."""
    run = Map(random_weights(Format.INT4_F16, 32, 40, 128, seed=1), device)
    x, out = poisoned(tokens + 3, 128).to(device), poisoned(tokens + 3, 40).to(device)
    x[:tokens] = rand(rng, tokens, 128).to(device)
    run(x[:tokens], None, out[:tokens])
    assert out[tokens:].isnan().all()
    check(run.weights, x[:tokens], None, BF16, device)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("size", [(40, 256), (17, 544)], ids=str)
@pytest.mark.parametrize(("bias", "dtype"), [(BF16, torch.float32), (torch.float32, BF16)])
def test_bias(
    bias: torch.dtype, dtype: torch.dtype, size: tuple[int, int], tokens: int, rng: torch.Generator,
    device: torch.device,
) -> None:  # fmt: skip
    weights = random_weights(Format.Q4_K, 32, *size, seed=3)
    check(weights, rand(rng, tokens, size[1]), rand(rng, size[0], dtype=bias), dtype, device)


@pytest.mark.parametrize("tokens", [1, 3])
def test_strided_rows(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    run = Map(random_weights(Format.INT8_F16, 32, 20, 64, seed=4), device)
    for first in (8, 9):
        x, out = rand(rng, tokens, 100).to(device)[:, first : first + 64], poisoned(tokens, 30).to(device)
        run(x, None, out[:, 4:24])
        assert out[:, :4].isnan().all()
        assert out[:, 24:].isnan().all()
        same = run(x.contiguous(), None, poisoned(tokens, 20).to(device))
        assert torch.equal(out[:, 4:24], same)
        check(run.weights, x, None, BF16, device)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("tokens", [1, 2])
def test_nan_codes(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    """A NaN stays in its row, whichever part of the columns it is in."""
    weights = random_weights(Format.FP8_PANEL, 128, 17, 544, seed=5)
    weights.arrays["codes"][3, 543] = 0x7F
    got = Map(weights, device)(rand(rng, tokens, 544).to(device), None, poisoned(tokens, 17).to(device))
    assert got[:, 3].isnan().all()
    assert got[:, [row for row in range(17) if row != 3]].isfinite().all()


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("least", [4, 16])
@pytest.mark.parametrize("form", [Form(Format.Q4_K, 32), Form(Format.FP8_PANEL, 128)], ids=names)
def test_fewer_rows_have_the_bits_of_least_rows(
    form: Form, least: int, rng: torch.Generator, device: torch.device
) -> None:
    run, x = Map(random_weights(form.format, form.group, 40, 544, seed=5), device), rand(rng, least, 544).to(device)
    every = run(x, None, poisoned(least, 40).to(device))
    for tokens in (1, least - 1):
        assert torch.equal(run(x[:tokens], None, poisoned(tokens, 40).to(device), least), every[:tokens])


def test_no_rows(device: torch.device) -> None:
    run = Map(random_weights(Format.INT8_F16, 32, 20, 64, seed=4), device)
    run(torch.empty(0, 64, dtype=BF16, device=device), None, torch.empty(0, 20, dtype=BF16, device=device))


@pytest.mark.usefixtures("shared")
def test_unsupported_arguments_are_refused(device: torch.device) -> None:
    run = Map(random_weights(Format.INT8_F16, 32, 17, 544, seed=4), device)
    x, out = torch.zeros(2, 544, dtype=BF16, device=device), torch.zeros(2, 17, dtype=BF16, device=device)
    short, partial = (torch.zeros(n, device=device) for n in (1, partial_floats(2, run.of)))
    for given, why in (
        ((x[:, 1:], run.panels, run.of, None, out, partial, run.arrived), "x must be"),
        ((x, run.panels[1:], run.of, None, out, partial, run.arrived), "panels must be"),
        ((x, run.panels, run.of, out[0, 1:], out, partial, run.arrived), "the bias"),
        ((x, run.panels, run.of, None, out[:1], partial, run.arrived), "out must be"),
        ((x, run.panels, run.of, None, out, short, run.arrived), "partial must be"),
        ((x, run.panels, run.of, None, out, partial, run.arrived[1:]), "arrivals"),
    ):
        with pytest.raises(ValueError, match=why):
            linear_packed.linear_packed(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=names)
@pytest.mark.parametrize("size", [(5120, 2048), (2048, 4096), (512, 2880), (17000, 512)], ids=str)
def test_shapes_of_models(form: Form, size: tuple[int, int], rng: torch.Generator, device: torch.device) -> None:
    weights = random_weights(form.format, form.group, *size, seed=1)
    for tokens in (1, 2, 16, 32, 64, 200):
        check(weights, rand(rng, tokens, size[1]), None, torch.float32, device)
