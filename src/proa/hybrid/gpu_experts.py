"""The GPU's part of a layer: Triton kernels over packed experts, by address. Never: whose experts they are."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.ops.residency import Located
from proa.ops.triton.experts import Added, ExpertSpace, combine, expert_space, experts
from proa.ops.triton.locate import locate


class GpuSpaces:
    """Memory between kernels, shared by layers of one shape: their calls follow one another."""

    def __init__(self, tokens: int, top_k: int) -> None:
        self._tokens, self._top_k = tokens, top_k
        self._made: dict[object, ExpertSpace] = {}

    def of(self, memory: LayerMemory) -> ExpertSpace:
        device = memory.slots.up.device
        key = (memory.shape, memory.experts, device)
        if key not in self._made:
            self._made[key] = expert_space(self._tokens, self._top_k, memory.experts, memory.shape, device)
        return self._made[key]


class GpuExperts:
    """Implements DeviceExperts."""

    def __init__(self, memory: LayerMemory, space: ExpertSpace) -> None:
        self._shape, self._space = memory.shape, space
        self._residency = memory.slots.residency(memory.experts, memory.in_ram)

    def locate(self, ids: Tensor) -> Located:
        up, down = (torch.empty(ids.shape, dtype=torch.int64, device=ids.device) for _ in range(2))
        at = Located(ids, up, down, torch.empty_like(ids))
        locate(ids, self._residency, at)
        return at

    def start(self, x: Tensor, at: Located) -> Tensor:
        experts(x, at, self._shape, self._space, self._residency.down)
        return self._space.partial

    def finish(
        self,
        started: Tensor,
        at: Located,
        weights: Tensor,
        cpu: Tensor | None,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        out = torch.empty(len(weights), self._shape.hidden, dtype=torch.bfloat16, device=weights.device)
        combine(started, weights, at.down, Added(cpu, shared, gate), out)
        return out
