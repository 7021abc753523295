"""Router rules in float64, with error bounds for float32. Never: tests.

The error of exp is eps32 of its argument, that of a sum of n values n roundings. If that can change the order of two
experts, either may be chosen; weights are compared with those of the chosen ids.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from proa.models.spec import ExpertGroups, Router
from proa.ops.table import RouterRule

EPS32 = torch.finfo(torch.float32).eps
SCORES: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")

ROUTERS = {
    "plain": Router("softmax", False),
    "qwen3": Router("softmax", True),
    "minimax-m2": Router("sigmoid", True, correction=True),
    "deepseek-v2": Router("softmax", False, groups=ExpertGroups(4, 2, 1), scale=16.0),
    "deepseek-v3": Router("sigmoid", True, True, ExpertGroups(4, 2, 2), 2.5, 1e-20),
    "sigmoid": Router("sigmoid", False, scale=0.3),
    "ernie": Router("softmax", True, correction=True, least=1e-12),
    "corrected softmax": Router("softmax", True, correction=True, epsilon=0.1, least=0.2),
}


def fits(experts: int, top_k: int, router: Router) -> bool:
    """True if the kept groups have at least top_k experts."""
    groups = router.groups or ExpertGroups(1, 1, 1)
    size, rest = divmod(experts, groups.groups)
    return not rest and size >= groups.best_of and groups.kept * size >= top_k


def case(tokens: int, experts: int, top_k: int, router: Router, rng: torch.Generator) -> tuple[Tensor, RouterRule]:
    """Random logits, and a rule; a correction, if the router has one, is as large as scores, with both signs."""
    size = 0.3 if router.score == "sigmoid" else 2 / experts
    correction = torch.randn(experts, generator=rng) * size if router.correction else None
    return torch.randn(tokens, experts, generator=rng) * 2, RouterRule(top_k, router, correction)


def on(rule: RouterRule, device: torch.device) -> RouterRule:
    return RouterRule(rule.top_k, rule.router, None if rule.correction is None else rule.correction.to(device))


def assert_right(logits: Tensor, rule: RouterRule, ids: Tensor, weights: Tensor) -> None:
    """Check ids and weights [T, k] of rows without padding."""
    assert weights.dtype == torch.float32
    router, wide, ids = rule.router, logits.double(), ids.long()
    experts = logits.shape[1]
    scores = torch.softmax(wide, -1) if router.score == "softmax" else 1 / (1 + torch.exp(-wide))
    keys = scores if rule.correction is None else scores + rule.correction.double()
    if router.groups:
        by_group = keys.unflatten(-1, (router.groups.groups, -1))
        merits = by_group.sort(-1, descending=True).values[..., : router.groups.best_of].sum(-1)
        order = merits.sort(dim=-1, descending=True, stable=True).indices
        left_out = torch.zeros_like(merits).scatter(-1, order[:, router.groups.kept :], 1.0)
        keys = by_group.masked_fill(left_out[..., None] > 0, -torch.inf).flatten(-2)
    order = keys.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    span = (2 * wide.abs()).amax(-1, keepdim=True)
    off = (2 * span + experts + rule.top_k + 16) * EPS32  # relative, of a score
    apart = (keys.gather(-1, order) - keys.gather(-1, ids)).abs()
    near = (apart > 0) & (apart <= 2 * off * scores.amax(-1, keepdim=True))  # equal keys are in the order of ids
    assert ((ids == order) | near).all()
    assert all(len(set(row)) == rule.top_k for row in ids.tolist())
    want = scores.gather(-1, ids)
    if router.renormalise:
        want = want / (want.sum(-1, keepdim=True) + router.epsilon).clamp(min=router.least)
    want = want * router.scale
    assert torch.isfinite(weights).all()
    assert ((weights.double() - want).abs() <= want * off).all()
