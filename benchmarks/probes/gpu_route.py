"""What choosing experts costs on a GPU, rule by rule: the kernel that only chooses, and the one that does all that
stands before the experts of a few rows. Needs a GPU.

Everything runs in a CUDA graph, one call after another. A rule's first row is the one to compare the others with.
Run: PYTHONPATH=src python benchmarks/probes/gpu_route.py
"""

from __future__ import annotations

import torch
from gpu_experts import microseconds
from torch import Tensor

from proa.ops.residency import Located, Residency
from proa.ops.table import Norm, RouterRule
from proa.ops.triton.choose import MOST_ROWS, ChooseOutputs, RouterRows, choice_space, choose
from proa.ops.triton.route import SOME_RULES, route

DEVICE = torch.device("cuda")
HIDDEN, CALLS = 3072, 50


def routing(rows: int, experts: int, rule: RouterRule) -> float:
    logits, slots = torch.randn(rows, experts, device=DEVICE), torch.arange(rows, device=DEVICE)
    ids, weights = pairs(rows, rule, torch.int32), pairs(rows, rule, torch.float32)
    return microseconds([lambda: route(logits, slots, rule, ids, weights)] * CALLS)


def choosing(rows: int, experts: int, rule: RouterRule) -> float:
    x, y, total, normed = (torch.randn(rows, HIDDEN, device=DEVICE).bfloat16() for _ in range(4))
    weight = torch.randn(experts, HIDDEN, device=DEVICE).bfloat16()
    router = RouterRows(weight, weight[:, 0].contiguous() if rule.router.linear_bias else None)
    norm = Norm(torch.ones(HIDDEN, device=DEVICE).bfloat16(), 1e-6)
    addresses = torch.arange(1, experts + 1, device=DEVICE)
    residency = Residency(addresses, addresses, torch.full_like(addresses, -1, dtype=torch.int32))
    kinds = (torch.int32, torch.int64, torch.int64, torch.int32)
    at = Located(*(pairs(rows, rule, kind) for kind in kinds))
    out = ChooseOutputs(total, normed, pairs(rows, rule, torch.float32), at)
    slots, space = torch.arange(rows, device=DEVICE), choice_space(DEVICE)
    return microseconds([lambda: choose(x, y, norm, router, slots, rule, residency, space, out)] * CALLS)


def pairs(rows: int, rule: RouterRule, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, rule.top_k, dtype=dtype, device=DEVICE)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}: microseconds of a call, hidden {HIDDEN}")
    for experts, top_k, router in SOME_RULES:
        correction = torch.randn(experts, device=DEVICE) if router.correction else None
        rule = RouterRule(top_k, router, correction)
        groups = f", {router.groups.kept} of {router.groups.groups} groups" if router.groups else ""
        kind = f"{router.score}{', corrected' if router.correction else ''}{groups}"
        times = {f"route {n}": routing(n, experts, rule) for n in (1, 4, 64)}
        times |= {f"choose {n}": choosing(n, experts, rule) for n in (1, MOST_ROWS)}
        shown = "  ".join(f"{name} {us:6.2f}" for name, us in times.items())
        print(f"{f'{top_k} of {experts}, {kind}':48} {shown}", flush=True)


if __name__ == "__main__":
    main()
