"""--deferred-experts, the CPU's lightest experts one MoE layer late: its conditions and its row. Never: which pairs."""

from __future__ import annotations

from proa.errors import UsageError
from proa.models.ranks import CPU
from proa.models.spec import Model
from proa.plan.plan import GpuPlan
from proa.types import Decision

_REMEDY = "Leave it out."


def deferral_rows(asked: int, model: str, gpu: GpuPlan | None, spec: Model, no_gpu: str = "") -> tuple[Decision, ...]:
    """Rows of the start-up table. no_gpu: why no GPU is used.

    Raises UsageError if deferral would have no effect, or if tokens have fewer experts.
    """
    if not asked:
        return ()
    given = f"--deferred-experts {asked}"
    top_k = max((moe.top_k for moe in spec.routed.values()), default=0)
    if gpu is None:
        raise _refused(f"{given} lets a GPU go on while the CPU computes experts, but no GPU is used: {no_gpu}.")
    layers = sum(CPU in owners for owners in gpu.owners)
    if layers < 2:
        few = "no layer" if not layers else "only one layer"
        raise _refused(f"{given} adds experts of the CPU one MoE layer later, but {few} of {model} has experts in RAM.")
    if asked > top_k:
        remedy = f"Use 1 to {top_k}; the fewer, the less is lost."
        raise UsageError(f"{given} is more than the {top_k} experts of a token.", remedy, param="deferred_experts")
    why = (
        f"as asked; lossy: in decode, of a token's {asked} experts of least weight those that the CPU computes are "
        "added one MoE layer later, while the GPU goes on; proa check with this option measures the KL divergence"
    )
    return (Decision("deferred experts", str(asked), f"{asked} of {top_k}", why),)


def _refused(what: str) -> UsageError:
    return UsageError(what, _REMEDY, param="deferred_experts")
