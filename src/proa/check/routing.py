"""Compares a path's choice of experts with the reference: ids by their margin, weights by a bound. Never: tensors of
experts.

A near tie may fall either way, so an expert is wrong only if its score lies further below the best ones than rounding
explains. All other comparisons take the path's own ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proa.check.bounds import FLOAT32, logit_bounds
from proa.models.spec import ExpertGroups
from proa.ops.table import RouterRule

_RENORMALISED = 4.0  # a weight is a ratio of scores, each of which is off by up to twice the logits' bound


@dataclass(frozen=True)
class Routed:
    """excess: of each row, difference / bound [T]. experts: of each row, the expert with that difference."""

    excess: Tensor
    experts: Tensor


def scores_of(logits: Tensor, rule: RouterRule) -> Tensor:
    return torch.softmax(logits, -1) if rule.router.score == "softmax" else torch.sigmoid(logits)


def weights_at(logits: Tensor, ids: Tensor, rule: RouterRule) -> Tensor:
    """Weights of the given experts, float32 [T, k]: `route` of ops/reference.py with forced ids."""
    weights = scores_of(logits, rule).gather(-1, ids)
    if rule.router.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.router.epsilon).clamp(min=rule.router.least)
    return weights * rule.router.scale


def compare(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RouterRule, ids: Tensor, weights: Tensor) -> Routed:
    """x [T, H]: the router's input. ids, weights [T, k]: the path's."""
    logits = torch.nn.functional.linear(x.float(), weight, bias)
    bound = logit_bounds(x, weight).amax(-1, keepdim=True)  # of any score: their slope is at most 1
    count = logits.shape[1]
    valid = (ids >= 0) & (ids < count)
    sound = valid.all(-1) & (ids.sort(-1).values.diff(dim=-1) != 0).all(-1)
    safe = ids.clamp(0, count - 1)
    wanted = weights_at(logits, safe, rule)
    off = (weights.float() - wanted).abs() / (wanted.abs() * (_RENORMALISED * bound + FLOAT32) + 1e-30)
    slack = 2 * bound + FLOAT32
    missed = _margins(scores_of(logits, rule), safe, rule, slack) / slack
    excess = torch.maximum(off, missed).nan_to_num(nan=torch.inf)
    worst, which = excess.masked_fill(~valid, torch.inf).max(-1)
    return Routed(worst.masked_fill(~sound, torch.inf), ids.gather(-1, which[:, None])[:, 0])


def _margins(scores: Tensor, ids: Tensor, rule: RouterRule, slack: Tensor) -> Tensor:
    """How far each chosen expert's score lies below the lowest score that should be chosen; 0 if it does not. [T, k]
    slack [T, 1]: differences of scores that rounding explains."""
    choice = scores if rule.correction is None else scores + rule.correction
    k = ids.shape[1]
    groups = rule.router.groups
    if groups is None:
        return (choice.topk(k, -1).values[:, -1:] - choice.gather(-1, ids)).clamp(min=0)
    merits = choice.view(len(choice), groups.groups, -1).topk(groups.best_of, -1).values.sum(-1)
    own = ids // (choice.shape[1] // groups.groups)
    of_groups = merits.topk(groups.kept, -1).values[:, -1:] - merits.gather(-1, own)
    eligible = _eligible(choice, merits, own, groups, slack)
    least = choice.masked_fill(~eligible, -torch.inf).topk(k, -1).values[:, -1:]
    of_experts = least - choice.gather(-1, ids)
    return torch.maximum(of_groups / groups.best_of, of_experts).clamp(min=0)


def _eligible(choice: Tensor, merits: Tensor, own: Tensor, groups: ExpertGroups, slack: Tensor) -> Tensor:
    """Experts of the groups that the path used, and of those that are kept whatever was rounded. [T, E]"""
    used = torch.zeros_like(merits, dtype=torch.bool).scatter(-1, own, True)
    if groups.kept < groups.groups:
        first_out = merits.topk(groups.kept + 1, -1).values[:, -1:]
        used |= merits > first_out + groups.best_of * slack
    else:
        used |= True
    return used.repeat_interleave(choice.shape[1] // groups.groups, -1)
