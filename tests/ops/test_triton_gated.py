"""silu(gate) * up against float64: the error of exp is its argument's rounding; every step adds one rounding."""

from __future__ import annotations

import pytest
import torch

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from proa.ops.triton.gated import gated


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("width", [1, 40, 1024, 1100])
def test_silu_mul(tokens: int, width: int, rng: torch.Generator, device: torch.device) -> None:
    """Rows are parts of longer ones, the rest of which is neither read nor written."""
    whole, out = poisoned(tokens, 2 * width + 3).to(device), poisoned(tokens, width + 5).to(device)
    given = (rand(rng, tokens, 2 * width) * 4).bfloat16()
    whole[:, : 2 * width] = given.to(device)
    gated(whole[:, : 2 * width], out[:, :width])
    gate, up = given.double().chunk(2, -1)
    want = gate * gate.sigmoid() * up
    assert_within(out[:, :width], want, want.abs() * (gate.abs() + 16) * EPS32 + stored(want))
    assert out[:, width:].isnan().all()


def test_far_from_zero(device: torch.device) -> None:
    gate = torch.tensor([[-0.0, 80.0, 9984.0]], dtype=BF16)
    out = poisoned(1, 3).to(device)
    gated(torch.cat([gate, torch.ones(1, 3, dtype=BF16)], -1).to(device), out)
    assert torch.equal(out.cpu(), gate)


def test_unsupported_arguments_are_refused(device: torch.device) -> None:
    out = torch.zeros(2, 8, dtype=BF16, device=device)
    for given, why in ((out, "gate and up must be"), (torch.zeros(2, 16, device=device), "bfloat16")):
        with pytest.raises(ValueError, match=why):
            gated(given, out)
    gated(out[:0].repeat(1, 2), out[:0])
