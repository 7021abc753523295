"""The `choose` op composed of norm, router and route. Never: the fused kernel (triton/choose.py)."""

from __future__ import annotations

from torch import Tensor

from proa.ops.residency import Residency
from proa.ops.table import AddNorm, Choose, Chosen, LinearMap, Norm, RmsNorm, Route, RouterRule


def composed_choose(rms_norm: RmsNorm, add_norm: AddNorm, route: Route) -> Choose:
    """Make a Choose that runs one op after another."""

    def choose(
        x: Tensor, y: Tensor | None, norm: Norm, router: LinearMap, slots: Tensor, rule: RouterRule,
        residency: Residency | None,
    ) -> tuple[Tensor, Tensor, Chosen]:  # fmt: skip
        x, normed = (x, rms_norm(x, norm)) if y is None else add_norm(x, y, norm)
        return x, normed, Chosen(*route(router(normed), slots, rule))

    return choose
