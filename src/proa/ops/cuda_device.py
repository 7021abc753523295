"""The GPU-only ops on an NVIDIA GPU: kernels in Triton. Never: kernels, decisions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from proa.ops.added import Added
from proa.ops.bell_block import BellBlock
from proa.ops.cuda_linear import router_rows
from proa.ops.device_table import DeviceOps
from proa.ops.faults import LayerFaults
from proa.ops.residency import Located, Residency
from proa.ops.table import NextRouter
from proa.ops.triton import bell, choose, draw, expert_sum, experts, locate, logprobs, look_ahead, weights


def device_ops(device: torch.device, capability: int = 0) -> DeviceOps:
    """Make the table. Its buffers for hints serve one doorbell, on one stream. capability: see expert_space."""
    space = look_ahead.look_space(device)

    def foresee(
        x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int, block: BellBlock
    ) -> None:  # fmt: skip
        rows = router_rows(following.router)
        if rows is None or len(x) > look_ahead.MOST_ROWS or x.shape[1] > choose.MOST_COLUMNS:
            return
        look_ahead.look_ahead(x, following.norm, rows, following.rule, slots, cpu, layer, block, space)

    return DeviceOps(
        locate=_locate,
        expert_space=partial(experts.expert_space, capability=capability),
        experts=experts.experts,  # type: ignore[arg-type]  # takes its own ExpertSpace alone
        sum_experts=_sum_experts,
        add_experts=_add_experts,
        sums_beside_bell=expert_sum.can_wait,
        push=bell.push,
        pull=bell.pull,
        take=bell.take,
        poll=bell.poll,
        foresee=foresee,
        edit=weights.edit,
        restore=weights.restore,
        draw=draw.draw,
        row_logprobs=logprobs.row_logprobs,
    )


def _locate(ids: Tensor, residency: Residency) -> Located:
    up, down = (torch.empty(ids.shape, dtype=torch.int64, device=ids.device) for _ in range(2))
    at = Located(ids, up, down, torch.empty(ids.shape, dtype=torch.int32, device=ids.device))
    locate.locate(ids, residency, at)
    return at


def _sum_experts(
    partial: Tensor, weights: Tensor, at: Located, added: Added, faults: LayerFaults, x: Tensor
) -> expert_sum.ExpertSum:  # fmt: skip
    return expert_sum.ExpertSum(partial, weights, at.down, added, expert_sum.Watch(faults, at.ids, x))


def _add_experts(
    partial: Tensor, weights: Tensor, at: Located, total: Tensor | None, faults: LayerFaults, x: Tensor
) -> Tensor:
    if total is None:  # one variant of the kernel for the first group and the others
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    into, watch = expert_sum.Into(total), expert_sum.Watch(faults, at.ids, x)
    expert_sum.combine(partial, weights, at.down, Added(total), into, watch)
    return total
