"""All routed experts of a model: made layer by layer, bound to a device and to one way to the CPU when loaded. Belongs
here: putting the parts together, and what must hold while a step is computed. Never: decisions, kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from proa.hybrid.faults import Fault, FaultRecords
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.runtime import DeviceExperts, HybridExperts
from proa.hybrid.transport import Transport
from proa.native.doorbell import JobSize
from proa.native.weights import Experts
from proa.ops.faults import LayerFaults
from proa.ops.packed import Memory
from proa.ops.residency import ExpertShape
from proa.ops.staging import Staging

NewDevice = Callable[[LayerMemory, LayerFaults], DeviceExperts]
NewTransport = Callable[[Sequence[Experts], JobSize], Transport]


@dataclass(frozen=True)
class Placement:
    """resident: of each MoE layer, in the model's order, the experts that the device has. inclusive: so has RAM."""

    resident: tuple[tuple[int, ...], ...]
    inclusive: bool


class HybridModel:
    """`new_experts` is what the model's layers are built with."""

    def __init__(self, placement: Placement, device: torch.device, ram: Memory, staging: Staging) -> None:
        self._placement, self._device, self._ram, self._staging = placement, device, ram, staging
        self.layers: list[HybridExperts] = []
        self.transport: Transport | None = None
        self._faults: FaultRecords | None = None

    def new_experts(self, experts: int, hidden: int, width: int) -> HybridExperts:
        resident = self._placement.resident[len(self.layers)]
        shape = ExpertShape(hidden, width)
        memory = LayerMemory(
            shape, experts, resident, self._placement.inclusive, self._device, self._ram, self._staging
        )
        number = sum(layer.memory.cpu_computes for layer in self.layers)  # among those that the CPU knows
        self.layers.append(HybridExperts(number, memory))
        return self.layers[-1]

    def bind(self, most_tokens: int, top_k: int, new_device: NewDevice, new_transport: NewTransport) -> None:
        """Weights are loaded: jobs have up to `most_tokens` rows of `top_k` experts."""
        shared = [layer.memory for layer in self.layers if layer.memory.cpu_computes]
        if shared:
            stacks = [memory.stacks for memory in shared]
            size = JobSize(most_tokens, top_k, shared[0].shape.hidden)
            self.transport = new_transport([stack.experts() for stack in stacks if stack is not None], size)
        self._faults = FaultRecords(most_tokens, top_k, self._device)
        for number, layer in enumerate(self.layers):
            layer.memory.fill_slots()
            device = new_device(layer.memory, self._faults.of(number))
            layer.bind(device, self.transport if layer.memory.cpu_computes else None)

    def begin(self) -> None:
        """A step is about to be launched."""
        if self.transport is not None:
            self.transport.arm()

    def end(self) -> None:
        """The device has finished it. Raises what went wrong on the CPU."""
        if self.transport is not None:
            self.transport.disarm()
            self.transport.check()

    def faults(self, rows: int) -> list[Fault]:
        """Of the rows of the steps since the last call: which were not finite, and where that began."""
        return [] if self._faults is None else self._faults.take(rows)
