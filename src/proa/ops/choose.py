"""The `choose` op composed of add_norm, router and route. Never: the fused kernel (triton/choose.py)."""

from __future__ import annotations

from torch import Tensor

from proa.ops.residency import Residency
from proa.ops.table import AddNorm, Choose, Chosen, LinearMap, Norm, Route, RouterRule


def composed_choose(add_norm: AddNorm, route: Route) -> Choose:
    """Make a Choose that runs one op after another."""

    def choose(
        x: Tensor, y: Tensor, norm: Norm, router: LinearMap, slots: Tensor, rule: RouterRule,
        residency: Residency | None,
    ) -> tuple[Tensor, Tensor, Chosen]:  # fmt: skip
        x, normed = add_norm(x, y, norm.weight, norm.eps, norm.offset)
        return x, normed, Chosen(*route(router(normed), slots, rule))

    return choose
