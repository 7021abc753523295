"""Three ways in which a GPU hands a job to the CPU and waits for its answer; transport.py says why each is correct.
Never: choosing one, the CPU's side.
"""

from __future__ import annotations

import functools
import time
from typing import Protocol

import torch
from torch import Tensor

from proa.errors import NativeError
from proa.hybrid.cuda_driver import Driver
from proa.native.doorbell import BlockLayout, Doorbell, JobSize, Way, block_layout
from proa.ops.bell_block import Bell, copied, views
from proa.ops.device_table import DeviceOps
from proa.ops.table import NextRouter

FLAG, FAILED = 1, 1 << 31  # csrc/src/doorbell.h
POLLS = 1 << 20  # polls of the trial kernel over PCIe, about 1 us each, until it sees the CPU's write
STARTED_S = 0.001  # from the event before the trial kernel to the CPU's write: the kernel polls by then
_CPU_WORD = 12  # bytes from the header to a word that nothing else writes


class GpuWay(Protocol):
    """Launches on the current stream and may be captured. push, foresee, pull and bell: see Transport."""

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None: ...

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None: ...

    def pull(self, out: Tensor) -> None: ...

    def bell(self, layer: int) -> Bell | None: ...

    def try_out(self) -> None:
        """Try the way before a wait without a bound depends on it. Raises NativeError if such a wait would hang."""

    def free(self) -> None:
        """End waits that may not see that the doorbell has failed. Call it after Doorbell.fail."""


def make_way(way: Way, memory: Tensor, size: JobSize, ops: DeviceOps, state: Tensor, doorbell: Doorbell) -> GpuWay:
    """Make `way`. memory uint8: the doorbell's block, pinned; state: on the GPU. Raises NativeError if the driver does
    not support it."""
    if way is Way.NUMBER:
        return ByKernels(memory, size, ops, state)
    driver, device = Driver(), state.device
    signals = Flags(driver, memory, block_layout(size), device) if way is Way.FLAGS else Calls(driver, doorbell)
    copy = torch.zeros(len(memory), dtype=torch.uint8, device=device)
    return ByCopies(memory, size, ops, state, copy, driver, signals)


class ByKernels:
    """Kernels write the job into pinned memory and poll there for its answer."""

    def __init__(self, memory: Tensor, size: JobSize, ops: DeviceOps, state: Tensor) -> None:
        self._block = views(memory, block_layout(size), size)
        at = block_layout(size).header + _CPU_WORD
        self._word = memory[at : at + 4].view(torch.int32)
        self._device, self._state, self._ops = state.device, state, ops

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None:
        self._ops.push(x, ids, weights, up_address, layer, self._block, self._state)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None:
        self._ops.foresee(x, slots, following, cpu, layer, self._block)

    def pull(self, out: Tensor) -> None:
        self._ops.pull(out, self._block, self._state)

    def bell(self, layer: int) -> Bell | None:
        return Bell(self._block, self._state, layer)

    def try_out(self) -> None:
        """Check that a running kernel sees what the CPU writes. The trial kernel polls at most POLLS times."""
        found = torch.zeros(1, dtype=torch.int32, device=self._device)
        self.poll(1, found)  # compiles and loads the kernel
        began, ended = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self._device).synchronize()
        began.record()
        self.poll(POLLS, found)
        ended.record()
        began.synchronize()
        time.sleep(STARTED_S)
        self._word.fill_(1)
        ended.synchronize()
        self._word.zero_()
        if not found.item():
            raise NativeError(f"A kernel of {self._device} does not see what the CPU writes to pinned memory.")

    def poll(self, polls: int, found: Tensor) -> None:
        """Launch a kernel that polls the word up to `polls` times, until it is not 0, and copies it to `found`."""
        self._ops.poll(self._word, polls, found)

    def free(self) -> None:
        pass  # try_out has shown that kernels see the CPU's writes, and so the failure


class Signals(Protocol):
    """Signals around a job that is copied, in stream order."""

    def before(self, stream: int) -> None:
        """Wait until the next job may be copied to the CPU."""

    def ring(self, stream: int) -> None:
        """Tell the CPU that the job's copy is complete."""

    def wait(self, stream: int) -> None:
        """Wait until the CPU has answered."""

    def free(self) -> None:
        """See GpuWay.free."""


class Copies(Protocol):
    """The part of Driver that copies, in stream order."""

    def stream(self, device: torch.device) -> int:
        """Return the handle of the current stream."""

    def copy_to_host(self, stream: int, to: int, source: int, nbytes: int) -> None: ...

    def copy_to_device(self, stream: int, to: int, source: int, nbytes: int) -> None: ...


class ByCopies:
    """A kernel writes the job into GPU memory; the job is copied to the CPU, and the answer is copied back."""

    def __init__(
        self, host: Tensor, size: JobSize, ops: DeviceOps, state: Tensor, memory: Tensor, driver: Copies,
        signals: Signals,
    ) -> None:  # fmt: skip
        """host, memory: uint8 blocks for a job of `size`, in pinned memory and on the GPU."""
        self._device, self._state, self._driver, self._signals, self._ops = memory.device, state, driver, signals, ops
        self._jobs = functools.cache(lambda tokens: (copied(memory, size, tokens), copied(host, size, tokens)))

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None:
        here, there = self._jobs(len(x))
        stream = self._driver.stream(self._device)
        self._ops.push(x, ids, weights, up_address, layer, here.block, self._state)
        self._signals.before(stream)
        self._driver.copy_to_host(stream, there.job.data_ptr(), here.job.data_ptr(), here.job.nbytes)
        self._signals.ring(stream)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None:
        """Do nothing: copying the hint costs more time than the prefetch saves."""

    def pull(self, out: Tensor) -> None:
        here, there = (job.block for job in self._jobs(len(out)))
        stream = self._driver.stream(self._device)
        self._signals.wait(stream)
        self._driver.copy_to_device(stream, here.y.data_ptr(), there.y.data_ptr(), here.y.nbytes)
        self._ops.take(out, here, self._state)

    def bell(self, layer: int) -> Bell | None:
        return None

    def try_out(self) -> None:
        """Load the kernels that follow a wait, since loading may wait for the stream. Signals that fail are found by
        the probe's timeout, and `free` ends their waits."""
        here, _ = self._jobs(1)
        self._ops.take(torch.empty(here.block.y.shape, device=self._device), here.block, self._state)

    def free(self) -> None:
        self._signals.free()


class Flags:
    """Signals by stream memory operations. A graph stores the same value at each replay, so flags are set and reset
    instead of counted."""

    def __init__(self, driver: Driver, memory: Tensor, layout: BlockLayout, device: torch.device) -> None:
        if not driver.has_stream_mem_ops(device):
            raise NativeError(f"The driver has no stream memory operations for {device}.")
        at = driver.device_address(memory.data_ptr())
        self._driver, self._device = driver, device
        self._rung, self._done, self._ready = at + layout.rung, at + layout.done, at + layout.ready

    def before(self, stream: int) -> None:
        self._driver.wait_for_bits(stream, self._ready, FLAG | FAILED)

    def ring(self, stream: int) -> None:
        self._driver.store(stream, self._rung, FLAG)

    def wait(self, stream: int) -> None:
        self._driver.wait_for_bits(stream, self._done, FLAG | FAILED)
        self._driver.store(stream, self._rung, 0)

    def free(self) -> None:
        """Store the failure from the GPU, which may not see the CPU's writes."""
        self.free_on(torch.cuda.Stream(self._device).cuda_stream)  # type: ignore[no-untyped-call]

    def free_on(self, stream: int) -> None:
        for flag in (self._done, self._ready):
            self._driver.store(stream, flag, FAILED)


class Calls:
    """Signals by calls: a thread of the driver calls the doorbell's native functions, without the GIL."""

    def __init__(self, driver: Driver, doorbell: Doorbell) -> None:
        self._driver, self._calls = driver, doorbell.calls

    def before(self, stream: int) -> None:
        pass  # the last wait returned after the CPU's answer

    def ring(self, stream: int) -> None:
        self._driver.call(stream, self._calls.ring, self._calls.doorbell)

    def wait(self, stream: int) -> None:
        self._driver.call(stream, self._calls.wait, self._calls.doorbell)

    def free(self) -> None:
        pass  # the calls run on the CPU and see the failure
