"""A trial of the CPU's experts at start: what an expert and what a (token, expert) pair cost. Never: using the cost."""

from __future__ import annotations

import time

import torch

from proa.hybrid.layer_memory import LayerMemory
from proa.machine.cost.prefill import CpuExpertCost, fitted_cost
from proa.native.pool import Pool
from proa.native.weights import Rows, moe

EXPERTS = 16  # of a job: too many for the caches, few enough to be quick
MANY_TOKENS = 128  # of the longer job
RUNS = 3  # of each job; the fastest counts


def try_cpu(memory: LayerMemory, pool: Pool, top_k: int) -> CpuExpertCost:
    """Measure the layer's experts in RAM: jobs of few and of many tokens. The calling thread takes part."""
    few = min(top_k, len(memory.in_ram), EXPERTS)
    tokens = max(1, EXPERTS // few)
    return fitted_cost(_job(memory, pool, few, tokens), _job(memory, pool, few, MANY_TOKENS))


def _job(memory: LayerMemory, pool: Pool, top_k: int, tokens: int) -> tuple[float, float, float]:
    """(experts, pairs, seconds) of a job."""
    if memory.stacks is None:
        raise ValueError("no expert of this layer is in RAM")
    hidden, count, experts = memory.shape.hidden, len(memory.in_ram), memory.stacks.experts()
    among = min(EXPERTS, count)
    x, y = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.empty(tokens, hidden)
    weights, fastest = torch.ones(tokens, top_k), float("inf")
    for run in range(RUNS):
        first = run * among % (count - among + 1)  # other experts, which no cache holds yet
        ids = first + (torch.arange(tokens * top_k).view(tokens, top_k) % among).to(torch.int32)
        begin = time.perf_counter()
        moe(
            pool, experts, Rows(x.data_ptr(), hidden), Rows(y.data_ptr(), hidden, True), tokens,
            ids=ids.data_ptr(), weights=weights.data_ptr(), top_k=top_k,
        )  # fmt: skip
        fastest = min(fastest, time.perf_counter() - begin)
    return min(among, tokens * top_k), tokens * top_k, fastest
