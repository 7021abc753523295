"""Dequantising packed weights of every format to bfloat16 rows, from the bytes that the CPU's kernels read."""

from __future__ import annotations

import pytest
import torch

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned
from packing import CASES, Packed, Weights, random_weights
from proa.native.formats import Form, Format
from proa.ops.triton.unpack import unpack

FORMS = [Form(*case) for case in CASES]
E4M3 = [form for form in FORMS if form.format in (Format.FP8_ROW, Format.FP8_PANEL, Format.MXFP8)]


def names(form: Form) -> str:
    return form.format.name


def panels_of(weights: Weights, device: torch.device) -> torch.Tensor:
    packed = Packed([weights])
    data = torch.frombuffer(packed.memory, dtype=torch.uint8).clone()
    return data.view(packed.layout.panels, packed.layout.panel_bytes).to(device)


@pytest.mark.parametrize("every_code", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=names)
@pytest.mark.parametrize("size", [(40, 150), (33, 1056)], ids=str)
def test_rows(form: Form, size: tuple[int, int], every_code: bool, device: torch.device) -> None:
    """Weights are rounded once, bfloat16 not at all. Nothing is written outside of the rows."""
    weights = random_weights(form.format, form.group, *size, seed=1, every_code=every_code)
    out = poisoned(size[0] + 1, size[1] + 3).to(device)
    unpack(panels_of(weights, device), weights.layout, out[:-1, : size[1]])
    values, sizes = torch.from_numpy(weights.values), torch.from_numpy(weights.scaled)
    rounding = 0.0 if form.format is Format.BF16 else 2.0**-8 * 1.01
    assert_within(out[:-1, : size[1]], values, values.abs() * rounding + sizes * 4 * EPS32)
    assert out[-1].isnan().all()
    assert out[:, size[1] :].isnan().all()


def test_some_panels(device: torch.device) -> None:
    weights = random_weights(Format.Q4_K, 32, 80, 256, seed=2)
    panels, whole, part = panels_of(weights, device), poisoned(80, 256).to(device), poisoned(30, 256).to(device)
    unpack(panels, weights.layout, whole)
    unpack(panels[2:4], weights.layout, part)
    assert torch.equal(part, whole[32:62])


@pytest.mark.parametrize("form", E4M3, ids=names)
def test_nan_codes(form: Form, device: torch.device) -> None:
    """A NaN stays within its own columns and row."""
    weights = random_weights(form.format, form.group, 40, 256, seed=1)
    weights.arrays["codes"][17, 85] = 0xFF
    out = poisoned(40, 256).to(device)
    unpack(panels_of(weights, device), weights.layout, out)
    assert out.isnan()[17, 85]
    assert out.isnan().sum() <= 4


def test_unsupported_arguments_are_refused(device: torch.device) -> None:
    weights = random_weights(Format.INT8_F16, 32, 32, 64, seed=1)
    panels, out = panels_of(weights, device), torch.zeros(32, 64, dtype=BF16, device=device)
    for given, why in (
        ((panels, weights.layout, out.float()), "out must be"), ((panels, weights.layout, out[:, 1:]), "out must be"),
        ((panels[:, 1:], weights.layout, out), "panels must be"), ((panels[:1], weights.layout, out), "1 panels"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            unpack(*given)
