"""A router's rule as arguments of kernels: a struct for the native ones, numbers and constants for Triton's. Never:
choosing experts.
"""

from __future__ import annotations

from proa.models.spec import ExpertGroups
from proa.native import program
from proa.ops.table import RouterRule

SCORES = {"softmax": 0, "sigmoid": 1}  # PROA_SCORE_* of native.h; also branches of ops/triton/route.py

NUMBERS = ("scale", "epsilon", "least")  # arguments of Triton kernels; the other parts of a rule are constants


def native_rule(experts: int, rule: RouterRule, correction: int | None) -> program.RouterRule:
    """The struct for the native kernels. correction: address of the rule's correction, which must stay alive."""
    router, groups = rule.router, rule.router.groups or ExpertGroups(1, 1, 1)
    return program.RouterRule(
        experts=experts, top_k=rule.top_k, score=SCORES[router.score], renormalise=router.renormalise, **vars(groups),
        **{name: getattr(router, name) for name in NUMBERS}, correction=correction,
    )  # fmt: skip


def rule_constants(experts: int, rule: RouterRule) -> dict[str, object]:
    """Constants of Triton kernels that route: see best_experts in ops/triton/route.py."""
    router = rule.router
    groups = router.groups or ExpertGroups(1, 0, 1)
    per_group = _power_of_two(experts // groups.groups)
    return {
        "EXPERTS": experts, "TOP_K": rule.top_k, "RENORMALISE": router.renormalise, "SCORE": SCORES[router.score],
        "GROUPS": groups.groups, "KEPT": groups.kept, "BEST_OF": groups.best_of,
        "LANES": _power_of_two(groups.groups) * per_group, "PER_GROUP": per_group, "CHOSEN": _power_of_two(rule.top_k),
    }  # fmt: skip


def rule_arguments(experts: int, rule: RouterRule) -> dict[str, object]:
    """The rule as arguments of Triton kernels by name, except its correction."""
    return {name: getattr(rule.router, name) for name in NUMBERS} | rule_constants(experts, rule)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
