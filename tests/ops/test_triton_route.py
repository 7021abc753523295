"""The router kernel against float64. Probabilities: exp errs by eps32 of its argument, a sum of n by n roundings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned
from proa.ops.triton.route import route


def outputs(tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and weights that nobody has written yet."""
    ids, weights = torch.full((tokens, top_k), -77, dtype=torch.int32), poisoned(tokens, top_k, dtype=torch.float32)
    return ids.to(device), weights.to(device)


def check(logits: Tensor, slots: Tensor, top_k: int, renormalise: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    experts = logits.shape[1]
    got_ids, got_weights = outputs(len(logits), top_k, device)
    route(logits.to(device), slots.to(device), top_k, renormalise, got_ids, got_weights)
    probs = torch.softmax(logits.double(), -1)
    ids = probs.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]  # of equals the lower id
    want = probs.gather(-1, ids)
    want = want / want.sum(-1, keepdim=True) if renormalise else want
    real = slots >= 0
    assert torch.equal(got_ids.cpu()[real].long(), ids[real])
    span = (logits.amax(-1, keepdim=True) - logits.amin(-1, keepdim=True)).double()
    assert_within(got_weights[real.to(device)], want[real], (want * (2 * span + experts + top_k + 16) * EPS32)[real])
    assert (got_ids.cpu()[~real] == -1).all()
    assert not got_weights.cpu()[~real].any()
    return got_ids, got_weights


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (5, 8, 2), (3, 60, 4), (2, 128, 8), (2, 300, 5), (1, 1024, 32)]
)
def test_route(
    tokens: int, experts: int, top_k: int, renormalise: bool, rng: torch.Generator, device: torch.device
) -> None:
    check(torch.randn(tokens, experts, generator=rng) * 3, torch.arange(tokens), top_k, renormalise, device)


def test_padding_rows(rng: torch.Generator, device: torch.device) -> None:
    """What a padding row holds does not matter, not even NaN."""
    logits = torch.randn(5, 12, generator=rng)
    logits[1], logits[4] = math.nan, math.inf
    check(logits, torch.tensor([3, -1, 0, 9, -1]), 4, True, device)


def test_of_equals_the_lower_id_comes_first(device: torch.device) -> None:
    logits = torch.zeros(3, 20)
    logits[1, [7, 3, 19]] = 2.0
    logits[2, 5:] = -math.inf
    ids, _ = check(logits.nan_to_num(neginf=-1e30), torch.arange(3), 5, False, device)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [3, 7, 19, 0, 1], [0, 1, 2, 3, 4]]


def test_strided_logits(rng: torch.Generator, device: torch.device) -> None:
    wide = poisoned(3, 40, dtype=torch.float32)
    wide[:, 8:24] = torch.randn(3, 16, generator=rng)
    got, again = outputs(3, 4, device), outputs(3, 4, device)
    slots = torch.arange(3, device=device)
    route(wide.to(device)[:, 8:24], slots, 4, True, *got)
    route(wide[:, 8:24].contiguous().to(device), slots, 4, True, *again)
    assert torch.equal(got[0], again[0])
    assert torch.equal(got[1], again[1])


def test_logits_in_bfloat16(rng: torch.Generator, device: torch.device) -> None:
    check((torch.randn(5, 24, generator=rng) * 3).to(BF16), torch.arange(5), 4, True, device)


@pytest.mark.parametrize("experts", [6, 8])
def test_a_logit_that_is_no_number_shows_and_chooses_what_exists(experts: int, device: torch.device) -> None:
    logits = torch.zeros(2, experts)
    logits[1, 2] = math.nan
    ids, weights = outputs(2, 3, device)
    route(logits.to(device), torch.arange(2, device=device), 3, True, ids, weights)
    assert weights[1].isnan().any()
    assert ids.min() >= 0
    assert ids.max() < experts
    assert_within(weights[0], torch.full((3,), 1 / 3, dtype=torch.float64), torch.full((3,), 8 * EPS32))


def test_what_it_cannot_do_is_refused(device: torch.device) -> None:
    logits, slots = torch.zeros(1, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="9 of 8"):
        route(logits, slots, 9, True, *outputs(1, 9, device))
    with pytest.raises(ValueError, match="float32"):
        route(logits.double(), slots, 2, True, *outputs(1, 2, device))
    with pytest.raises(ValueError, match="wanted"):
        route(logits, slots, 2, True, *outputs(1, 3, device))
