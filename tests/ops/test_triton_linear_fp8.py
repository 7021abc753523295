"""Products of fp8 with fp8 against float64 of the same codes: rounding is the rows' alone (test_triton_fp8_rows.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.fp8_cases import NEEDS_FP8, sum_bound, values
from ops.triton_bounds import BF16, assert_within, poisoned, rand, stored
from packing import Packed, Weights, random_weights
from proa.native.formats import E4M3_FORMS, Form, Format
from proa.ops.triton import linear_fp8
from proa.ops.triton.fp8_rows import Fp8Rows, fp8_rows, round_rows
from proa.ops.triton.linear_fp8 import LARGE, SMALL

pytestmark = NEEDS_FP8


def panels_of(weights: Weights, device: torch.device) -> Tensor:
    packed = Packed([weights])
    data = torch.frombuffer(packed.memory, dtype=torch.uint8).clone()
    return data.view(packed.layout.panels, packed.layout.panel_bytes).to(device)


def rounded(x: Tensor, weights: Weights, device: torch.device) -> Fp8Rows:
    rows = fp8_rows(len(x), weights.layout, device)
    round_rows(x.to(device), rows)
    return rows


def check(weights: Weights, x: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
    rows, panels = rounded(x, weights, device), panels_of(weights, device)
    out = poisoned(len(x) + 1, len(weights.values) + 3, dtype=dtype).to(device)
    got = out[:-1, : len(weights.values)]
    linear_fp8.linear_fp8(rows, panels, weights.layout, bias if bias is None else bias.to(device), got)
    wide, exact = values(rows, x.shape[1]), torch.from_numpy(weights.values).T
    offset = torch.zeros(exact.shape[1], dtype=torch.float64) if bias is None else bias.double()
    want = wide @ exact + offset
    bound = sum_bound(wide.abs() @ exact.abs() + offset.abs(), x.shape[1], device)
    assert_within(got, want, bound + stored(want.abs() + bound, dtype))
    assert out[-1].isnan().all()
    assert out[:, len(weights.values) :].isnan().all()


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_fp8, "_tile", lambda *_: request.param)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(3, 40, 150), (70, 150, 384), (130, 17, 416)])
def test_products(form: Form, tokens: int, rows: int, columns: int, rng: torch.Generator, device: torch.device) -> None:
    check(random_weights(*form, rows, columns, seed=tokens), rand(rng, tokens, columns), None, BF16, device)


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
@pytest.mark.parametrize(("bias", "dtype"), [(BF16, torch.float32), (torch.float32, BF16)])
def test_bias(
    form: Form, bias: torch.dtype, dtype: torch.dtype, rng: torch.Generator, device: torch.device
) -> None:  # fmt: skip
    weights = random_weights(*form, 40, 256, seed=2)
    check(weights, rand(rng, 5, 256), rand(rng, 40, dtype=bias), dtype, device)


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
def test_every_code(form: Form, rng: torch.Generator, device: torch.device) -> None:
    """Of weights, the smallest too."""
    check(random_weights(*form, 256, 128, seed=3, every_code=True), rand(rng, 4, 128), None, torch.float32, device)


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
def test_what_is_no_number_stays_in_its_row(form: Form, rng: torch.Generator, device: torch.device) -> None:
    weights, x = random_weights(*form, 40, 256, seed=4), rand(rng, 5, 256)
    weights.arrays["codes"][3, 200] = 0x7F
    x[2, 17] = torch.nan
    out = poisoned(5, 40).to(device)
    linear_fp8.linear_fp8(rounded(x, weights, device), panels_of(weights, device), weights.layout, None, out)
    bad = torch.zeros(5, 40, dtype=torch.bool)
    bad[2], bad[:, 3] = True, True
    assert torch.equal(out.isnan().cpu(), bad)


def test_no_rows(rng: torch.Generator, device: torch.device) -> None:
    weights = random_weights(Format.FP8_PANEL, 128, 32, 128, seed=4)
    rows = fp8_rows(0, weights.layout, device)
    out = torch.empty(0, 32, dtype=BF16, device=device)
    linear_fp8.linear_fp8(rows, panels_of(weights, device), weights.layout, None, out)


def test_what_it_cannot_do_is_refused(rng: torch.Generator, device: torch.device) -> None:
    weights = random_weights(Format.FP8_PANEL, 128, 40, 256, seed=4)
    of, panels = weights.layout, panels_of(weights, device)
    x, out = rounded(rand(rng, 2, 256), weights, device), poisoned(2, 40).to(device)
    other = random_weights(Format.MXFP8, 32, 40, 256, seed=4).layout
    for given, why in (
        ((x, panels, other, None, out), "were not made"), ((x.first(1), panels, of, None, out), "out is"),
        ((Fp8Rows(x.codes, x.scales[:, :1]), panels, of, None, out), "were not made"),
        ((x, panels[1:], of, None, out), "panels are"), ((x, panels, of, out[0, 1:], out), "the bias"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            linear_fp8.linear_fp8(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
@pytest.mark.parametrize("size", [(5120, 2048), (2048, 4096), (512, 2880)], ids=str)
def test_shapes_of_models(form: Form, size: tuple[int, int], rng: torch.Generator, device: torch.device) -> None:
    weights = random_weights(*form, *size, seed=1)
    for tokens in (64, 200, 1024):
        check(weights, rand(rng, tokens, size[1]), None, torch.float32, device)
