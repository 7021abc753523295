"""Jobs that are copied, by flags and by calls: kernels in Triton's interpreter, and a driver that does at once what the
real one does in a stream's order, with a real doorbell. On a GPU test_gpu_transport.py tries them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl

from bell_cases import Layer, random_job
from have_gpu import HAVE_GPU
from native_hooks import kill_worker
from proa.errors import NativeError
from proa.hybrid import gpu_ways
from proa.hybrid.cuda_driver import Driver
from proa.native.doorbell import Doorbell, JobSize, Memory, Way, block_layout
from proa.native.pool import Pool
from proa.ops.bell_block import STATE_WORDS
from proa.ops.cuda_device import device_ops
from proa.ops.triton import bell

pytestmark = pytest.mark.skipif(HAVE_GPU, reason="tests/hybrid/test_gpu_transport.py runs the real ones")
SIZE = JobSize(most_tokens=5, top_k=2, hidden=64)
COPIED = [Way.FLAGS, Way.CALLS]
STREAM = 7


class FakeDriver(Driver):
    """Executes each call at once, on the calling thread."""

    has = True
    waits_s = 20.0

    def __init__(self) -> None:
        self.said: list[str] = []

    def stream(self, device: torch.device) -> int:
        return STREAM

    def has_stream_mem_ops(self, device: torch.device) -> bool:
        return self.has

    def device_address(self, host_address: int) -> int:
        return host_address

    def _note(self, what: str, stream: int) -> None:
        assert stream == STREAM
        self.said.append(what)

    def copy_to_host(self, stream: int, to: int, source: int, nbytes: int) -> None:
        self._note("copy", stream)
        ctypes.memmove(to, source, nbytes)

    copy_to_device = copy_to_host

    def store(self, stream: int, device_address: int, value: int) -> None:
        self._note("store", stream)
        ctypes.c_uint32.from_address(device_address).value = value

    def wait_for_bits(self, stream: int, device_address: int, bits: int) -> None:
        self._note("wait", stream)
        end = time.monotonic() + self.waits_s
        while not ctypes.c_uint32.from_address(device_address).value & bits:
            assert time.monotonic() < end, "the GPU would hang"
            time.sleep(0)

    def call(self, stream: int, function: int, argument: int) -> None:
        self._note("call", stream)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> FakeDriver:
    def ring(rung: Any, number: Any) -> None:
        tl.store(rung, number)

    made = FakeDriver()
    monkeypatch.setattr(bell, "ring", ring)
    monkeypatch.setattr(gpu_ways, "Driver", lambda: made)
    return made


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


class Rig:
    def __init__(self, pool: Pool, layers: list[Layer], way: Way, device: torch.device) -> None:
        self.layers = layers
        layout = block_layout(SIZE)
        memory = torch.zeros(layout.bytes, dtype=torch.uint8)
        experts = [layer.experts for layer in layers]
        self.doorbell = Doorbell(pool, experts, SIZE, Memory(memory.data_ptr(), layout.bytes, memory), way=way)
        self.state = torch.zeros(STATE_WORDS + SIZE.most_tokens, dtype=torch.int32)
        self.way = gpu_ways.make_way(way, memory, SIZE, device_ops(device), self.state, self.doorbell)


@pytest.mark.parametrize("way", COPIED)
def test_answers_are_the_experts(
    way: Way, driver: FakeDriver, pool: Pool, device: torch.device, rng: torch.Generator
) -> None:
    layers = [Layer(SIZE.hidden, seed) for seed in range(2)]
    rig = Rig(pool, layers, way, device)
    rang = 0
    rig.way.try_out()
    rig.doorbell.arm()
    for i in range(12):
        job = random_job(rng, 1 + i * 2 % SIZE.most_tokens, SIZE, (0.4, 1.0, 0.0)[i % 3])
        rang += bool((job.theirs() >= 0).any())
        out = torch.full(job.x.shape, torch.nan)
        rig.way.push(*job.to(device), i % 2)
        rig.way.pull(out)
        assert torch.equal(out, job.exact(pool, layers[i % 2]))
    rig.doorbell.disarm()
    rig.doorbell.check()
    assert 0 < rang < 12
    assert rig.doorbell.counters().jobs == rang
    turn = {Way.FLAGS: ["wait", "copy", "store", "wait", "store", "copy"], Way.CALLS: ["copy", "call", "call", "copy"]}
    assert driver.said == turn[way] * 12


@pytest.mark.parametrize("way", COPIED)
def test_a_dead_worker_ends_every_wait(
    way: Way, driver: FakeDriver, pool: Pool, device: torch.device, rng: torch.Generator
) -> None:
    driver.waits_s = 2.0
    rig = Rig(pool, [Layer(SIZE.hidden, 0)], way, device)
    rig.doorbell.arm()
    kill_worker(pool)
    time.sleep(0.01)
    out = torch.empty(4, SIZE.hidden)
    for _ in range(5):  # the rest of the step
        rig.way.push(*random_job(rng, 4, SIZE, resident=0).to(device), 0)
        rig.way.pull(out)
    with pytest.raises(NativeError, match="worker thread"):
        rig.doorbell.check()


def test_a_wait_that_does_not_see_the_failure_is_freed(driver: FakeDriver, device: torch.device) -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    signals = gpu_ways.Flags(driver, memory, block_layout(SIZE), device)
    driver.waits_s = 0.0
    for wait in (signals.before, signals.wait):
        with pytest.raises(AssertionError, match="would hang"):
            wait(STREAM)
    signals.free_on(STREAM)
    signals.before(STREAM)
    signals.wait(STREAM)


def test_a_driver_without_memory_operations(driver: FakeDriver, pool: Pool, device: torch.device) -> None:
    driver.has = False
    with pytest.raises(NativeError, match="no stream memory operations for cpu"):
        Rig(pool, [Layer(SIZE.hidden, 0)], Way.FLAGS, device)
    Rig(pool, [Layer(SIZE.hidden, 0)], Way.CALLS, device)


def test_a_machine_without_a_driver() -> None:
    with pytest.raises(NativeError, match=r"no CUDA driver.*`--doorbell auto`"):
        Driver("libnothing.so.1")
