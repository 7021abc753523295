"""What stands before a MoE layer's experts, one op after another. Never: all of it in one kernel (triton/choose.py)."""

from __future__ import annotations

from torch import Tensor

from proa.ops.residency import Residency
from proa.ops.table import AddNorm, Choose, Chosen, LinearMap, Norm, Route, RouterRule


def in_steps(add_norm: AddNorm, route: Route) -> Choose:
    def choose(
        x: Tensor, y: Tensor, norm: Norm, router: LinearMap, slots: Tensor, rule: RouterRule,
        residency: Residency | None,
    ) -> tuple[Tensor, Tensor, Chosen]:  # fmt: skip
        x, normed = add_norm(x, y, norm.weight, norm.eps, norm.offset)
        return x, normed, Chosen(*route(router(normed), slots, rule))

    return choose
