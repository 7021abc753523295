"""One layer's routed experts on GPU and CPU: pairs are located once; the CPU gets its part, the GPU computes its own
meanwhile, and both are summed in float32. Never: placement, kernels, synchronisation (transport.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from proa.hybrid.deferral import Deferral
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

    def add(self, started: Tensor | None, x: Tensor, at: Located, weights: Tensor, total: Tensor | None) -> Tensor:
        """Weighted sum of the GPU's experts that were started plus `total`, float32 [T, hidden], to which it may be
        written. Non-finite rows are recorded."""

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

    @property
    def alone(self) -> bool:
        """Whether the device computes all experts of the pass: nothing is handed over, and the doorbell, which decode
        steps may use meanwhile, is left alone."""

    @property
    def groups(self) -> int:
        """Number of groups in which the layer's experts are in the ring one after the other."""

    @property
    def leaves_none(self) -> bool:
        """Whether passes copy all experts in RAM, so that the CPU gets no job."""

    @property
    def hands_over(self) -> bool:
        """Whether the CPU gets its pairs of the chunk under way together with the group under way."""

    @property
    def routed(self) -> bool:
        """Whether the layer's experts are divided once its routing is known."""

    def route(self, ids: Tensor) -> None:
        """Divide them. ids: [T, k], the choice; -1: none."""

    def join(self) -> None:
        """Make the next launches wait for the copies of this group."""

    def leave(self) -> None:
        """Note that the device's experts of the group have been launched for one chunk."""

    def summed(self) -> None:
        """Note that the wait for the CPU's sum of a chunk has been launched."""

    def collect(self, later: Callable[[], None] | None = None) -> None:
        """Launch the wait for the CPU's sum of the last chunk that was handed over, if that was not done. later:
        launches that of the chunk that is handed over now."""


class NotStreamed:
    """The layer has no part in passes."""

    active, alone, groups, leaves_none, hands_over, routed = False, False, 1, False, True, False

    def route(self, ids: Tensor) -> None:
        pass

    def collect(self, later: Callable[[], None] | None = None) -> None:
        pass

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
        self._in_groups: Sequence[DeviceExperts] = ()
        self._streamed: Streamed = NOT_STREAMED
        self._deferral = Deferral()

    def bind(
        self, device: DeviceExperts, transport: Transport | None, layer: int, deferral: Deferral | None = None
    ) -> None:
        """transport: None if the CPU computes no expert of this layer; layer: its number in the doorbell; deferral: the
        model's, None if nothing is deferred."""
        self._device, self._transport, self.layer = device, transport, layer
        self._deferral = deferral or Deferral()

    def stream(self, device: DeviceExperts, groups: Sequence[DeviceExperts], streamed: Streamed) -> None:
        """Take part in passes. device: the device's part of the layer in them, if the ring holds all its streamed
        experts at once; groups: for each group, if it does not."""
        self._in_pass, self._in_groups, self._streamed = device, groups, streamed

    @property
    def residency(self) -> Residency | None:
        """None where pairs are not located when experts are chosen: in groups, and before the choice has divided the
        experts."""
        if self._grouped or (self._streamed.active and self._streamed.routed):
            return None
        found = self._bound.residency
        if self._deferral.active and found.bell is not None:
            return replace(found, bell=replace(found.bell, layer=self._deferral.job(self.layer)))
        return found

    @property
    def _to_cpu(self) -> Transport | None:
        """The transport to which launches hand the CPU's pairs over now; None: to none."""
        streamed = self._streamed
        return None if streamed.active and (streamed.alone or streamed.leaves_none) else self._transport

    @property
    def _grouped(self) -> bool:
        return self._streamed.active and self._streamed.groups > 1

    @property
    def _bound(self) -> DeviceExperts:
        device = self._in_pass if self._streamed.active else self._device
        if device is None:
            raise ValueError("these experts are not bound to a device; call bind() first")
        return device

    def start(self, x: Tensor, chosen: Chosen) -> HybridUnderway | InGroups:
        device, weights, transport = self._bound, chosen.weights, self._to_cpu
        if self._grouped and self._transport is not None:
            groups = self._in_groups[: self._streamed.groups]
            return InGroups(groups, self._streamed, transport, self.layer, x, chosen)
        if self._streamed.active and self._streamed.routed:
            self._streamed.route(chosen.ids)
        at = device.locate(chosen.ids) if chosen.at is None else chosen.at
        if transport is not None and not at.handed_over:
            transport.push(x, at.cpu, weights, at.up, self._deferral.job(self.layer))
        streamed = self._streamed if self._streamed.active else NOT_STREAMED
        streamed.join()
        started = device.start(x, at, weights)
        streamed.leave()
        return HybridUnderway(device, transport, at, weights, started, x, streamed)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        if (transport := self._to_cpu) is not None:
            transport.foresee(x, slots, following, self._bound.residency.cpu, self.layer)

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
        self.at, self._weights, self._started, self._x = at, weights, started, x

    def groups(self) -> Iterator[None]:
        return iter(())

    def finish(self, shared: Tensor | None, gate: Tensor | None) -> Tensor | Unsummed:
        added = Added(self._of_cpu(), shared, gate)
        return self._device.finish(self._started, self._x, self.at, self._weights, added)

    def _of_cpu(self) -> Tensor | Bell | None:
        if self._streamed.alone and not self._streamed.leaves_none:
            # Zeros, as a pull without pairs gives: the same kernels run, and the bits are the same.
            return self._x.new_zeros(self._x.shape, dtype=torch.float32)
        if self._transport is None:
            return None
        bell = self._device.waits(self._x)
        if bell is not None:
            return bell
        out = self._x.new_empty(self._x.shape, dtype=torch.float32)
        self._transport.pull(out)
        self._streamed.summed()
        return out


class InGroups:
    """A chunk's experts of a layer whose streamed experts do not fit in the ring at once: they are computed group by
    group, and added up in float32.

    The CPU's block holds one job, so a chunk is handed over only after the sum of the one before was taken. Chunks are
    therefore handed over with different groups (`Streamed.hands_over`): the CPU computes while all groups are copied.
    """

    def __init__(
        self, devices: Sequence[DeviceExperts], streamed: Streamed, transport: Transport | None, layer: int, x: Tensor,
        chosen: Chosen,
    ) -> None:  # fmt: skip
        """devices: the device's part of each group. transport: None if the CPU computes none of the pass."""
        self._devices, self._streamed, self._transport, self._layer = devices, streamed, transport, layer
        self._x, self._chosen = x, chosen
        self._total: Tensor | None = None  # float32 [T, hidden], of what was added up so far
        self._waits = False  # the CPU's sum is not in the total yet
        self._last: tuple[Tensor | None, Located] | None = None  # what was started of the last group

    def groups(self) -> Iterator[None]:
        chosen, x = self._chosen, self._x
        first = self._devices[0].locate(chosen.ids)
        for number, device in enumerate(self._devices):
            if number:
                yield
            at = device.locate(chosen.ids) if number else first
            if self._transport is not None and self._streamed.hands_over:
                self._streamed.collect(partial(self._take, self._transport))
                self._transport.push(x, first.cpu, chosen.weights, first.up, self._layer)
                self._waits = True
            self._streamed.join()
            started = device.start(x, at, chosen.weights)
            self._streamed.leave()
            if number == len(self._devices) - 1:
                self._last = started, at
            else:
                self._total = device.add(started, x, at, chosen.weights, self._total)

    def _take(self, transport: Transport) -> None:
        """Add the CPU's sum."""
        of_cpu = self._x.new_empty(self._x.shape, dtype=torch.float32)
        transport.pull(of_cpu)
        self._total = of_cpu if self._total is None else self._total.add_(of_cpu)
        self._waits = False

    def finish(self, shared: Tensor | None, gate: Tensor | None) -> Tensor | Unsummed:
        if self._last is None:
            raise ValueError("groups() must be exhausted before finish()")
        if self._waits:
            self._streamed.collect()
        (started, at), device = self._last, self._devices[-1]
        return device.finish(started, self._x, at, self._chosen.weights, Added(self._total, shared, gate))
