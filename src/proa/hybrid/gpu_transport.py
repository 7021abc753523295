"""The transport between a GPU and the CPU; transport.py says why it is correct. Never: code that needs no GPU."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from proa.errors import NativeError
from proa.hybrid.gpu_ways import GpuWay, make_way
from proa.hybrid.transport import empty_round
from proa.hybrid.ways import REMEDY
from proa.native.doorbell import (
    ANY_SERVICE,
    Counters,
    Doorbell,
    JobSize,
    Memory,
    Service,
    Way,
    block_layout,
)
from proa.native.pool import Pool
from proa.native.weights import Experts
from proa.ops.bell_block import STATE_WORDS, Bell
from proa.ops.device_table import DeviceOps
from proa.ops.table import NextRouter

ANSWER_TIMEOUT_S = 1.0  # of the probe's rounds at start
LOOK_AGAIN_S = 1e-4
PROBES = 5
_NO_ANSWER = "The CPU did not answer an empty job of {device} within {seconds:g} s."


class GpuTransport:
    """Implements Transport for a GPU: push and pull launch on the current stream, and may be captured in a graph.

    Raises what Doorbell raises, and NativeError if the driver does not support `way`.
    """

    def __init__(
        self, pool: Pool, layers: Sequence[Experts], size: JobSize, device: torch.device, ops: DeviceOps,
        service: Service = ANY_SERVICE, way: Way = Way.NUMBER,
    ) -> None:  # fmt: skip
        layout = block_layout(size)
        memory = torch.zeros(layout.bytes, dtype=torch.uint8, pin_memory=True)
        self.device, self.size, self._closed = device, size, False
        self.can_foresee = self.foresees = service.read_ahead and way is Way.NUMBER
        self.doorbell = Doorbell(pool, layers, size, Memory(memory.data_ptr(), layout.bytes, memory), service, way)
        self._state = torch.zeros(STATE_WORDS + size.most_tokens, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # the zeros are there before a step on any stream; the thread has a context
        self._way: GpuWay = make_way(way, memory, size, ops, self._state, self.doorbell)
        torch.cuda.synchronize(device)
        if way is Way.CALLS:  # the driver may still call the doorbell's functions while this process ends
            atexit.register(_settle, weakref.ref(self))

    def arm(self) -> None:
        self.doorbell.arm()

    def disarm(self) -> None:
        self.doorbell.disarm()

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None:
        self._way.push(x, ids, weights, up_address, layer)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None:
        if self.foresees:
            self._way.foresee(x, slots, following, cpu, layer)

    def pull(self, out: Tensor) -> None:
        self._way.pull(out)

    def bell(self, layer: int) -> Bell | None:
        return self._way.bell(layer)

    def check(self) -> None:
        self.doorbell.check()

    def counters(self) -> Counters:
        return self.doorbell.counters()

    def probe_us(self, rounds: int = 200) -> float:
        """Microseconds of an empty round trip, measured in a graph, as in service: the best of PROBES, since a thread
        that is descheduled once costs milliseconds."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        again = empty_round(self, self.size, self.device)
        self.arm()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream(self.device))  # the tensors of the round
                self._way.try_out()
                again()  # compiles and loads the kernels
                self._finish(stream)
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    for _ in range(rounds):
                        again()
                took_ms = min(self._timed_ms(graph, stream) for _ in range(PROBES))
        finally:
            self.disarm()
        self.check()
        return took_ms / rounds * 1e3

    def _timed_ms(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(stream)
        graph.replay()
        took_ms: float = begin.elapsed_time(self._finish(stream))
        return took_ms

    def _finish(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        deadline_s = time.perf_counter() + ANSWER_TIMEOUT_S
        while not done.query():  # type: ignore[no-untyped-call]
            time.sleep(LOOK_AGAIN_S)  # the doorbell's thread may need this thread's CPU
            if time.perf_counter() > deadline_s:
                text = _NO_ANSWER.format(device=self.device, seconds=ANSWER_TIMEOUT_S)
                self.doorbell.fail(text)
                self._way.free()
                stream.synchronize()
                raise NativeError(text, REMEDY)
        return done

    def close(self) -> None:
        """Fail the doorbell, which ends all waits on the GPU, then synchronise and close."""
        if self._closed:
            return
        self._closed = True
        self.doorbell.fail("The doorbell was closed.")
        torch.cuda.synchronize(self.device)
        self.doorbell.close()


def _settle(transport: weakref.ref[GpuTransport]) -> None:
    alive = transport()
    if alive is not None:
        alive.close()
