"""The rules by which check tells rounding from an error, and names experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from proa.check import routing
from proa.check.blame import name_experts
from proa.check.bounds import over_bound, row_errors
from proa.models.spec import ExpertGroups, Router
from proa.ops.reference import route
from proa.ops.table import RouterRule

RULES = {
    "softmax": RouterRule(3, Router("softmax", renormalise=True)),
    "sigmoid": RouterRule(3, Router("sigmoid", renormalise=True, scale=2.5)),
    "groups": RouterRule(3, Router("sigmoid", renormalise=True, groups=ExpertGroups(4, 2, 2))),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rounding_to_bfloat16_is_within_the_bound() -> None:
    exact = numbers(64, 96) * torch.logspace(-3, 3, 96)  # columns of very different size
    assert over_bound(row_errors(exact.bfloat16(), exact, exact.bfloat16())).max() < 0.5


def test_an_error_of_three_percent_in_one_row_is_not() -> None:
    exact = numbers(64, 96) * torch.logspace(-3, 3, 96)
    got = exact.clone()
    got[5] *= 1.03
    over = over_bound(row_errors(got, exact, exact.bfloat16()))
    assert over[5] > 1
    assert over.argmax() == 5


def test_an_error_of_one_percent_in_all_rows_is_not() -> None:
    exact = numbers(64, 96)
    assert over_bound(row_errors(exact * 1.01, exact, exact.bfloat16())).min() > 1


def test_rows_that_are_not_finite() -> None:
    exact = numbers(8, 96)
    got = exact.clone()
    got[2, 3] = math.nan
    errors = row_errors(got, exact, exact.bfloat16())
    assert errors[2] == math.inf
    assert errors[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_the_reference_routes_as_it_should(name: str) -> None:
    x, weight = numbers(200, 32), numbers(16, 32, seed=1).bfloat16().float()
    logits = x @ weight.T
    ids, weights = route(logits, torch.zeros(200), RULES[name])
    assert routing.compare(x, weight, None, RULES[name], ids, weights).excess.max() <= 1
    torch.testing.assert_close(routing.weights_at(logits, ids, RULES[name]), weights)


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_expert_and_a_wrong_weight_are_named(name: str) -> None:
    x, weight = numbers(200, 32), numbers(16, 32, seed=1).bfloat16().float()
    logits = x @ weight.T
    ids, weights = route(logits, torch.zeros(200), RULES[name])
    ids[7, 1] = logits[7].argmin()
    weights[9, 2] *= 1.01
    found = routing.compare(x, weight, None, RULES[name], ids, weights)
    assert (found.excess > 1).nonzero().flatten().tolist() == [7, 9]
    assert found.experts[9] == ids[9, 2]


def test_a_near_tie_may_fall_either_way() -> None:
    x = torch.ones(1, 4)
    weight = torch.tensor([[1.0], [1.0 + 2.0**-24], [0.1], [0.0]]).expand(4, 4)
    rule = RouterRule(1, Router("softmax", renormalise=True))
    for chosen in (0, 1):
        ids = torch.tensor([[chosen]])
        assert routing.compare(x, weight, None, rule, ids, torch.ones(1, 1)).excess[0] <= 1


def experts_case(rows: int = 60, experts: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Contributions [T, k, H], a shared expert's [T, H], and ids [T, k]."""
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:3] for i in range(rows)])
    return numbers(rows, 3, 64), numbers(rows, 64, seed=3), ids


def blame(
    error: Tensor, parts: Tensor, shared: Tensor | None, ids: Tensor, steps: Tensor | None = None,
    copies: Tensor | None = None,
) -> str:  # fmt: skip
    error = error + 0.002 * numbers(*error.shape, seed=9)
    steps = torch.zeros(len(ids)) if steps is None else steps
    copies = torch.zeros_like(ids) if copies is None else copies
    return name_experts(error, parts, shared, ids, copies, steps, ~(error.norm(dim=1) <= 0.1))


def test_a_wrong_expert_is_named() -> None:
    parts, shared, ids = experts_case()
    error = torch.where((ids == 5).any(1)[:, None], 0.3 * numbers(60, 64, seed=4), 0.0)
    assert blame(error, parts, shared, ids) == "expert 5"
    error[(ids == 5).any(1)] = math.nan
    assert blame(error, parts, shared, ids) == "expert 5"


def test_an_expert_that_became_wrong_is_named() -> None:
    parts, shared, ids = experts_case()
    steps = torch.arange(60) // 20
    wrong = (ids == 5).any(1) & (steps > 0)
    error = torch.where(wrong[:, None], 0.3 * numbers(60, 64, seed=4), 0.0)
    assert blame(error, parts, shared, ids, steps) == "expert 5"


def test_an_expert_with_one_wrong_copy_is_named() -> None:
    """Each row is a step of its own, as in decode of one request, and two experts are in all wrong rows."""
    parts, shared, ids = experts_case()
    copies = (torch.arange(60)[:, None] % 4 == 0).int().expand_as(ids)
    wrong = (ids == 5).any(1) & (copies[:, 0] == 1)
    ids[wrong] = torch.tensor([2, 5, 7])
    error = torch.where(wrong[:, None], 0.3 * numbers(60, 64, seed=4), 0.0)
    assert blame(error, parts, shared, ids, torch.arange(60), torch.where(ids == 5, copies, 0)) == "expert 5"


def test_missing_contributions_are_named() -> None:
    parts, shared, ids = experts_case()
    lost = ((ids == 1) | (ids == 6))[..., None]
    assert blame(-(parts * lost).sum(1), parts, None, ids) == "expert 1, expert 6, missing from the sum"
    assert blame(-shared, parts, shared, ids) == "the shared expert, missing from the sum"
    assert blame((parts * lost).sum(1), parts, shared, ids) == "expert 1, expert 6, counted too often"


def test_errors_everywhere_are_of_all_experts() -> None:
    parts, shared, ids = experts_case()
    assert blame(numbers(60, 64, seed=4), parts, None, ids) == "all experts"
    assert blame(numbers(60, 64, seed=4), parts, shared, ids) == "all experts, or the shared one"
