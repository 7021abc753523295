"""One layer's routed experts on GPU and CPU: pairs are located once; the CPU gets its part, the GPU computes its own
meanwhile, and both are summed in float32. Never: placement, kernels, synchronisation (transport.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.transport import Transport
from proa.ops.added import Added
from proa.ops.bell_block import Bell
from proa.ops.residency import Located, Residency
from proa.ops.table import Chosen, NextRouter, Parameters, Unsummed


class DeviceExperts(Protocol):
    """The GPU's part of a layer."""

    @property
    def residency(self) -> Residency: ...

    def locate(self, ids: Tensor) -> Located:
        """Locate (token, expert) pairs. ids: int32 or int64 [T, k]; -1: no expert."""

    def start(self, x: Tensor, at: Located, weights: Tensor) -> Tensor | None:
        """Start the GPU's experts on x [T, hidden], all that reads their weights; return what only `finish` may
        read."""

    def waits(self, x: Tensor) -> Bell | None:
        """The doorbell at which `finish` waits for the CPU's sum itself; None: the caller must pull the sum first."""

    def finish(
        self, started: Tensor | None, x: Tensor, at: Located, weights: Tensor, added: Added
    ) -> Tensor | Unsummed:
        """Weighted sum of the GPU's experts plus `added`: bfloat16 [T, hidden]. Non-finite rows are recorded."""


class Streamed(Protocol):
    """The layer's part in passes of prompts, whose experts in RAM are partly copied to the device (streaming.py)."""

    @property
    def active(self) -> bool:
        """Whether launches belong to a pass now."""

    def join(self) -> None:
        """Make the next launches wait for the copies of this layer."""

    def leave(self) -> None:
        """The device's experts have been launched for one chunk."""

    def summed(self) -> None:
        """The wait for the CPU's sum of the chunk has been launched."""


class NotStreamed:
    """The layer has no part in passes."""

    active = False

    def join(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def summed(self) -> None:
        pass


NOT_STREAMED = NotStreamed()


class HybridExperts:
    """Implements Experts of ops/table.py. Call `bind` after loading."""

    def __init__(self, memory: LayerMemory) -> None:
        self.memory, self.layer = memory, -1
        self._device: DeviceExperts | None = None
        self._transport: Transport | None = None
        self._in_pass: DeviceExperts | None = None
        self._streamed: Streamed = NOT_STREAMED

    def bind(self, device: DeviceExperts, transport: Transport | None, layer: int) -> None:
        """transport: None if the CPU computes no expert of this layer; layer: its number in the doorbell."""
        self._device, self._transport, self.layer = device, transport, layer

    def stream(self, device: DeviceExperts, streamed: Streamed) -> None:
        """Take part in passes; device: the device's part of the layer in them."""
        self._in_pass, self._streamed = device, streamed

    @property
    def residency(self) -> Residency:
        return self._bound.residency

    @property
    def _bound(self) -> DeviceExperts:
        device = self._in_pass if self._streamed.active else self._device
        if device is None:
            raise ValueError("these experts are not bound to a device; call bind() first")
        return device

    def start(self, x: Tensor, chosen: Chosen) -> HybridUnderway:
        device, weights = self._bound, chosen.weights
        at = device.locate(chosen.ids) if chosen.at is None else chosen.at
        if self._transport is not None and not at.handed_over:
            self._transport.push(x, at.cpu, weights, at.up, self.layer)
        streamed = self._streamed if self._streamed.active else NOT_STREAMED
        streamed.join()
        started = device.start(x, at, weights)
        streamed.leave()
        return HybridUnderway(device, self._transport, at, weights, started, x, streamed)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        if self._transport is not None:
            self._transport.foresee(x, slots, following, self.residency.cpu, self.layer)

    def parameters(self) -> Parameters:
        return self.memory.parameters()


class HybridUnderway:
    def __init__(
        self,
        device: DeviceExperts,
        transport: Transport | None,
        at: Located,
        weights: Tensor,
        started: Tensor | None,
        x: Tensor,
        streamed: Streamed,
    ) -> None:
        self._device, self._transport, self._streamed = device, transport, streamed
        self._at, self._weights, self._started, self._x = at, weights, started, x

    def finish(self, shared: Tensor | None, gate: Tensor | None) -> Tensor | Unsummed:
        added = Added(self._of_cpu(), shared, gate)
        self._streamed.summed()
        return self._device.finish(self._started, self._x, self._at, self._weights, added)

    def _of_cpu(self) -> Tensor | Bell | None:
        if self._transport is None:
            return None
        bell = self._device.waits(self._x)
        if bell is not None:
            return bell
        out = self._x.new_empty(self._x.shape, dtype=torch.float32)
        self._transport.pull(out)
        return out
