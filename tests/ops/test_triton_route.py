"""The router kernel against float64, for every rule; tests/router_cases.py derives the error bound."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import router_cases as routers
from ops.triton_bounds import BF16, EPS32, assert_within, poisoned
from proa.models.spec import ExpertGroups, Router
from proa.ops.table import RouterRule
from proa.ops.triton.route import route

QWEN3 = Router("softmax", True)


def outputs(tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Poisoned outputs for ids and weights."""
    ids, weights = torch.full((tokens, top_k), -77, dtype=torch.int32), poisoned(tokens, top_k, dtype=torch.float32)
    return ids.to(device), weights.to(device)


def check(logits: Tensor, slots: Tensor, rule: RouterRule, device: torch.device) -> tuple[Tensor, Tensor]:
    ids, weights = outputs(len(logits), rule.top_k, device)
    route(logits.to(device), slots.to(device), routers.on(rule, device), ids, weights)
    ids, weights, real = ids.cpu(), weights.cpu(), slots >= 0
    routers.assert_right(logits[real], rule, ids[real], weights[real])
    assert (ids[~real] == -1).all()
    assert not weights[~real].any()
    return ids, weights


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (5, 8, 2), (3, 60, 4), (2, 128, 8), (2, 300, 5), (1, 1024, 32)]
)
@pytest.mark.parametrize("router", routers.ROUTERS.values(), ids=routers.ROUTERS)
def test_route(
    tokens: int, experts: int, top_k: int, router: Router, rng: torch.Generator, device: torch.device
) -> None:
    if not routers.fits(experts, top_k, router):
        return
    check(*_with_slots(routers.case(tokens, experts, top_k, router, rng), torch.arange(tokens)), device)


def _with_slots(case: tuple[Tensor, RouterRule], slots: Tensor) -> tuple[Tensor, Tensor, RouterRule]:
    return case[0], slots, case[1]


@pytest.mark.parametrize("groups", [ExpertGroups(8, 3, 1), ExpertGroups(3, 2, 2), ExpertGroups(12, 5, 2)])
def test_groups_of_any_number_and_size(groups: ExpertGroups, rng: torch.Generator, device: torch.device) -> None:
    for experts in (24, 72):
        router = Router("sigmoid", True, correction=True, groups=groups)
        check(*_with_slots(routers.case(4, experts, 6, router, rng), torch.arange(4)), device)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("router", routers.ROUTERS.values(), ids=routers.ROUTERS)
def test_padding_rows(router: Router, rng: torch.Generator, device: torch.device) -> None:
    """The contents of a padding row do not matter, not even NaN."""
    logits, rule = routers.case(5, 12, 4, router, rng)
    logits[1], logits[4] = math.nan, math.inf
    check(logits, torch.tensor([3, -1, 0, 9, -1]), rule, device)


def test_among_equals_the_lower_id_comes_first(device: torch.device) -> None:
    logits = torch.zeros(3, 20)
    logits[1, [7, 3, 19]] = 2.0
    logits[2, 5:] = -80.0
    for score in routers.SCORES:
        ids, _ = check(logits, torch.arange(3), RouterRule(5, Router(score, False)), device)
        assert ids.tolist() == [[0, 1, 2, 3, 4], [3, 7, 19, 0, 1], [0, 1, 2, 3, 4]]
        grouped = RouterRule(5, Router(score, False, groups=ExpertGroups(5, 2, 2)))
        ids, _ = check(logits, torch.arange(3), grouped, device)
        assert ids.tolist() == [[0, 1, 2, 3, 4], [3, 7, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_a_correction_affects_the_choice_but_not_the_weights(device: torch.device) -> None:
    """Even if it makes all keys negative, and an expert that is not chosen has the highest score."""
    rule = RouterRule(2, Router("sigmoid", False, correction=True), torch.tensor([-9.0, -8.0, -70.0, -8.5]))
    ids, weights = check(torch.tensor([[0.0, 0.0, 5.0, 0.0]]), torch.arange(1), rule, device)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_strided_logits(rng: torch.Generator, device: torch.device) -> None:
    wide = poisoned(3, 40, dtype=torch.float32)
    wide[:, 8:24] = torch.randn(3, 16, generator=rng)
    got, again = outputs(3, 4, device), outputs(3, 4, device)
    slots, rule = torch.arange(3, device=device), RouterRule(4, QWEN3)
    route(wide.to(device)[:, 8:24], slots, rule, *got)
    route(wide[:, 8:24].contiguous().to(device), slots, rule, *again)
    assert torch.equal(got[0], again[0])
    assert torch.equal(got[1], again[1])


def test_logits_in_bfloat16(rng: torch.Generator, device: torch.device) -> None:
    check((torch.randn(5, 24, generator=rng) * 3).to(BF16), torch.arange(5), RouterRule(4, QWEN3), device)


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("experts", [12, 16])
@pytest.mark.parametrize("router", routers.ROUTERS.values(), ids=routers.ROUTERS)
def test_a_nan_logit_gives_nan_weights_and_valid_ids(router: Router, experts: int, device: torch.device) -> None:
    logits = torch.zeros(3, experts)
    logits[1, 2], logits[2] = math.nan, math.nan
    rule = RouterRule(3, router, torch.zeros(experts, device=device) if router.correction else None)
    ids, weights = outputs(3, 3, device)
    route(logits.to(device), torch.arange(3, device=device), rule, ids, weights)
    assert weights[1:].isnan().all()
    assert ids.min() >= 0
    assert ids.max() < experts
    assert ids[0].tolist() == [0, 1, 2]
    assert weights[0].isfinite().all()


def test_a_nan_correction_gives_nan_weights(device: torch.device) -> None:
    correction = torch.zeros(6, device=device)
    correction[4] = math.nan
    ids, weights = outputs(1, 2, device)
    rule = RouterRule(2, Router("sigmoid", True, correction=True), correction)
    route(torch.zeros(1, 6, device=device), torch.arange(1, device=device), rule, ids, weights)
    assert weights.isnan().all()


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter
def test_infinite_logits_have_sigmoids(device: torch.device) -> None:
    logits = torch.tensor([[-math.inf, math.inf, 0.0]], device=device)
    ids, weights = outputs(1, 3, device)
    route(logits, torch.arange(1, device=device), RouterRule(3, Router("sigmoid", False)), ids, weights)
    assert ids.tolist() == [[1, 2, 0]]
    want = torch.tensor([[1.0, 0.5, 0.0]], dtype=torch.float64)
    assert_within(weights, want, want * EPS32 + 1e-37)


def test_unsupported_arguments_are_refused(device: torch.device) -> None:
    logits, slots = torch.zeros(1, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="9 of 8"):
        route(logits, slots, RouterRule(9, QWEN3), *outputs(1, 9, device))
    with pytest.raises(ValueError, match="float32"):
        route(logits.double(), slots, RouterRule(2, QWEN3), *outputs(1, 2, device))
    with pytest.raises(ValueError, match="outputs must be"):
        route(logits, slots, RouterRule(2, QWEN3), *outputs(1, 3, device))
    for groups in (ExpertGroups(3, 2, 1), ExpertGroups(4, 5, 1), ExpertGroups(8, 4, 2), ExpertGroups(2, 2, 3)):
        with pytest.raises(ValueError, match="do not fit"):
            route(logits, slots, RouterRule(2, Router("softmax", True, groups=groups)), *outputs(1, 2, device))
    few = Router("softmax", True, groups=ExpertGroups(4, 1, 1))
    with pytest.raises(ValueError, match="do not fit"):
        route(logits, slots, RouterRule(3, few), *outputs(1, 3, device))
    with pytest.raises(ValueError, match="the correction must be"):
        route(logits, slots, RouterRule(2, QWEN3, slots), *outputs(1, 2, device))
