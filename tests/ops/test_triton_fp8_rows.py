"""Rows rounded to e4m3, bit for bit as plain torch rounds them."""

from __future__ import annotations

import pytest
import torch

from ops.fp8_cases import NEEDS_FP8, NOT_FINITE, in_words, spec_round
from ops.triton_bounds import BF16, rand
from proa.native.formats import Form, Format, layout
from proa.ops.triton.fp8_rows import Fp8Rows, fp8_rows, round_rows, suits

BLOCKS, CHANNELS, TENSOR = Form(Format.FP8_PANEL, 128), Form(Format.FP8_ROW, 0), Form(Format.FP8_PANEL, 0)
pytestmark = NEEDS_FP8


def room(rows: int, columns: int, form: Form, device: torch.device) -> Fp8Rows:
    """Poisoned outputs, with one row more than needed."""
    made = fp8_rows(rows + 1, layout(form.format, 16, columns, form.group), device)
    made.codes.view(torch.uint8).fill_(0x55)
    made.scales.fill_(torch.nan)
    return made


@pytest.mark.parametrize("form", [BLOCKS, CHANNELS, TENSOR], ids=str)
@pytest.mark.parametrize("columns", [128, 150, 640, 1300])
def test_as_specified(form: Form, columns: int, rng: torch.Generator, device: torch.device) -> None:
    """Groups of all magnitudes, one of them zero; padding is zero, and nothing behind the rows is written."""
    x = rand(rng, 3, columns + 5)[:, :columns]
    x[0] *= 2.0 ** torch.randint(-30, 30, (columns,), generator=rng)
    x[1, :128] = 0
    x[2] *= 1e-36
    to = room(3, columns, form, device)
    round_rows(x.to(device), to.first(3))
    codes, scales = spec_round(x, form.group)
    assert torch.equal(to.codes.view(torch.uint8)[:3].cpu(), in_words(codes))
    assert torch.equal(to.scales[:3].cpu(), scales)
    assert (to.codes.view(torch.uint8)[3] == 0x55).all()
    assert to.scales[3].isnan().all()


@NOT_FINITE
@pytest.mark.parametrize("form", [BLOCKS, CHANNELS], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_inputs(form: Form, bad: float, rng: torch.Generator, device: torch.device) -> None:
    """A NaN's code is NaN, and so are its row's products; other rows are unaffected."""
    x = rand(rng, 3, 256)
    x[1, 200] = bad
    to = room(3, 256, form, device)
    round_rows(x.to(device), to.first(3))
    codes = in_words(to.codes[:3].cpu()).view(torch.float8_e4m3fn).float()
    assert codes[1, 200].isnan()
    assert codes[[0, 2]].isfinite().all()
    assert to.scales[[0, 2]].isfinite().all()


def test_weights_that_suit_e4m3_activations() -> None:
    for form, group, want in (
        (Format.FP8_PANEL, 128, True), (Format.FP8_PANEL, 64, False), (Format.FP8_ROW, 0, True),
        (Format.FP8_ROW, 128, False), (Format.MXFP8, 32, False), (Format.BF16, 0, False),
    ):  # fmt: skip
        assert suits(layout(form, 32, 256, group)) is want


def test_unsupported_arguments_are_refused(device: torch.device) -> None:
    to = room(1, 256, BLOCKS, device)
    x = torch.zeros(2, 256, dtype=BF16, device=device)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        fp8_rows(1, layout(Format.MXFP8, 16, 256, 32), device)
    for given, why in (
        ((x.float(), to), "x must be"), ((x[:, ::2], to), "x must be"), ((x[:1], to), "does not fit"),
        ((x[:, :100], to), "does not fit"), ((x, Fp8Rows(to.codes, to.scales[:, :1].T)), "does not fit"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            round_rows(*given)
