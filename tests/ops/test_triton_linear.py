"""Linear layers of few rows against float64: the error of a sum of n products in float32 is at most n + c roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from proa.ops.triton.linear import linear


def check(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    linear(x, weight, bias, out)
    offset = torch.zeros(len(weight), dtype=torch.float64, device=x.device) if bias is None else bias.double()
    want = x.double() @ weight.double().T + offset
    size = x.double().abs() @ weight.double().abs().T + offset.abs()
    assert_within(out, want, size * (x.shape[1] + 2) * EPS32 + stored(want, out.dtype))


@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 40), (19, 129), (33, 576)])
@pytest.mark.parametrize(("bias", "dtype"), [(None, BF16), (BF16, torch.float32), (torch.float32, BF16)])
def test_linear(
    tokens: int,
    outputs: int,
    inputs: int,
    bias: torch.dtype | None,
    dtype: torch.dtype,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    weight = rand(rng, outputs, inputs).to(device)
    b = rand(rng, outputs, dtype=bias).to(device) if bias else None
    check(rand(rng, tokens, inputs).to(device), weight, b, poisoned(tokens, outputs, dtype=dtype).to(device))


@pytest.mark.parametrize("tokens", range(1, 17))
def test_every_number_of_rows(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    """Rows beyond the batch are neither read, where NaN stands, nor written."""
    x, out = poisoned(17, 96).to(device), poisoned(17, 24).to(device)
    x[:tokens] = rand(rng, tokens, 96).to(device)
    check(x[:tokens], rand(rng, 24, 96).to(device), None, out[:tokens])
    assert out[tokens:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_strided_rows(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    x, weight = rand(rng, tokens, 100).to(device)[:, 8:72], rand(rng, 20, 80).to(device)[:, 16:]
    out = poisoned(tokens, 30).to(device)
    check(x, weight, None, out[:, 4:24])
    assert out[:, :4].isnan().all()
    assert out[:, 24:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("outputs", [1030, 2050])
def test_blocks_of_more_outputs(tokens: int, outputs: int, rng: torch.Generator, device: torch.device) -> None:
    x, weight = rand(rng, tokens, 32).to(device), rand(rng, outputs, 32).to(device)
    check(x, weight, None, poisoned(tokens, outputs).to(device))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(5120, 2048), (2048, 4096), (151936, 2048), (128, 2048), (2048, 2880)])
def test_shapes_of_models(tokens: int, outputs: int, inputs: int, rng: torch.Generator, device: torch.device) -> None:
    x, weight = rand(rng, tokens, inputs).to(device), rand(rng, outputs, inputs).to(device)
    first, again = poisoned(tokens, outputs).to(device), poisoned(tokens, outputs).to(device)
    check(x, weight, None, first)
    linear(x, weight, None, again)
    assert torch.equal(first, again)


@pytest.mark.parametrize("least", [2, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(19, 129), (1030, 96)])
def test_fewer_rows_have_the_bits_of_least_rows(
    outputs: int, inputs: int, least: int, rng: torch.Generator, device: torch.device
) -> None:
    x, weight = rand(rng, least, inputs).to(device), rand(rng, outputs, inputs).to(device)
    every = poisoned(least, outputs).to(device)
    linear(x, weight, None, every)
    for tokens in (1, least - 1):
        some = poisoned(tokens, outputs).to(device)
        linear(x[:tokens], weight, None, some, least)
        assert torch.equal(some, every[:tokens])


def test_no_rows(device: torch.device) -> None:
    linear(torch.empty(0, 8, dtype=BF16, device=device), torch.ones(4, 8, dtype=BF16, device=device), None,
           torch.empty(0, 4, dtype=BF16, device=device))  # fmt: skip


@pytest.mark.parametrize(
    ("x", "weight", "out", "why"),
    [((17, 8), (4, 8), (17, 4), "at most 16"), ((1, 8), (4, 9), (1, 4), "shapes"), ((1, 8), (4, 8), (1, 5), "shapes")],
)
def test_unsupported_arguments_are_refused(
    x: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], why: str, device: torch.device
) -> None:
    a, b, c = (torch.zeros(s, dtype=BF16, device=device) for s in (x, weight, out))
    with pytest.raises(ValueError, match=why):
        linear(a, b, None, c)
