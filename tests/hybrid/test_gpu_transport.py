"""Push and pull inside CUDA graphs, against the experts called directly. Only a GPU can run these."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bell_cases import Job, Layer, random_job
from native_hooks import kill_worker
from proa.errors import NativeError, NumericsError
from proa.hybrid.gpu_transport import GpuTransport
from proa.native.doorbell import JobSize, Service, Way
from proa.native.pool import Pool
from proa.ops.bell_block import JOB_NUMBER, PENDING
from proa.ops.cuda_device import device_ops

pytestmark = pytest.mark.gpu
LAYERS, DISTINCT = 48, 3
SIZE = JobSize(most_tokens=32, top_k=3, hidden=1024)
REPLAYS = int(os.environ.get("DOORBELL_REPLAYS", "200"))  # fewer under compute-sanitizer: make sanitize-gpu


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [Layer(SIZE.hidden, seed, poisoned=(5,) if seed == DISTINCT else ()) for seed in range(DISTINCT + 1)]


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool([[0, 0]], pin=False) as made:
        yield made


@pytest.fixture(params=list(Way), ids=lambda way: way.name.lower())
def way(request: pytest.FixtureRequest) -> Way:
    """All ways; a test of fewer ways parametrises it indirectly."""
    found: Way = request.param
    return found


@pytest.fixture
def transport(pool: Pool, layers: list[Layer], device: torch.device, way: Way) -> Iterator[GpuTransport]:
    """Layer i has the experts of layers[i % DISTINCT]; the one after the last gives NaN from expert 5."""
    experts = [layers[i % DISTINCT].experts for i in range(LAYERS)] + [layers[DISTINCT].experts]
    made = GpuTransport(pool, experts, SIZE, device, device_ops(device), Service(lane=1), way)
    yield made
    made.close()


@dataclass
class Step:
    """A captured graph of all layers, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]  # x, ids, weights, up_address [layers, T, ...]
    out: Tensor  # [layers, T, hidden]
    filled: Tensor

    def run(self, jobs: list[Job]) -> Tensor:
        for mine, parts in zip(self.inputs, zip(*(job.to(self.out.device) for job in jobs), strict=True), strict=True):
            mine.copy_(torch.stack(parts))
        self.out.fill_(torch.nan)
        self.graph.replay()
        return self.out.cpu()  # waits


def capture(transport: GpuTransport, tokens: int, rng: torch.Generator) -> Step:
    """Capture a step, after an eager run that compiles the kernels."""
    first = [random_job(rng, tokens, SIZE) for _ in range(LAYERS)]
    stacked = zip(*(job.to(transport.device) for job in first), strict=True)
    inputs = tuple(torch.stack(parts) for parts in stacked)
    out = torch.empty(LAYERS, tokens, SIZE.hidden, device=transport.device)
    filled = torch.ones(1 << 16, device=transport.device)

    def step() -> None:
        for layer in range(LAYERS):
            transport.push(*(of[layer] for of in inputs), layer)
            filled.mul_(1.0)
            transport.pull(out[layer])

    transport.arm()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    transport.disarm()
    return Step(graph, inputs, out, filled)


@pytest.mark.parametrize("tokens", [1, 4, 13, 32])
def test_replays_of_a_graph(
    transport: GpuTransport, pool: Pool, layers: list[Layer], tokens: int, rng: torch.Generator
) -> None:
    step = capture(transport, tokens, rng)
    spent_s = 0.0
    for i in range(REPLAYS):
        resident = (0.4, 0.0, 0.95, 1.0)[i % 4]
        jobs = [random_job(rng, tokens, SIZE, resident) for _ in range(LAYERS)]
        transport.arm()
        begin = time.perf_counter()
        got = step.run(jobs)
        spent_s += time.perf_counter() - begin
        transport.disarm()
        transport.check()
        for layer, job in enumerate(jobs):
            assert torch.equal(got[layer], job.exact(pool, layers[layer % DISTINCT])), f"replay {i}, layer {layer}"
    us = spent_s / REPLAYS / LAYERS * 1e6
    print(f"\n{transport.doorbell.way.name}, {tokens} tokens: {us:.1f} us a layer, with inputs' copies")  # noqa: T201


def test_eager_steps_of_changing_sizes(
    transport: GpuTransport, pool: Pool, layers: list[Layer], device: torch.device, rng: torch.Generator
) -> None:
    transport.arm()
    for i in range(REPLAYS // 2):
        job = random_job(rng, 1 + i * 7 % SIZE.most_tokens, SIZE, resident=(0.5, 1.0)[i % 2])
        out = torch.full(job.x.shape, torch.nan, device=device)
        x, ids, weights, up = job.to(device)
        transport.push(x, ids.int() if i % 3 else ids, weights, up, i % LAYERS)
        transport.pull(out)
        assert torch.equal(out.cpu(), job.exact(pool, layers[i % LAYERS % DISTINCT]))
    transport.disarm()
    transport.check()


def ends_soon(work: Callable[[], object]) -> None:
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 2


def test_a_dead_worker_ends_the_step(transport: GpuTransport, pool: Pool, rng: torch.Generator) -> None:
    step = capture(transport, 4, rng)
    transport.arm()
    kill_worker(pool)
    jobs = [random_job(rng, 4, SIZE, resident=0) for _ in range(LAYERS)]
    time.sleep(0.01)  # the worker has looked
    ends_soon(lambda: step.run(jobs))
    with pytest.raises(NativeError, match="worker thread"):
        transport.check()
    ends_soon(lambda: step.run(jobs))
    transport.disarm()


@pytest.mark.parametrize("way", [Way.NUMBER, Way.FLAGS], indirect=True)  # by calls, the CPU knows the job's number
@pytest.mark.parametrize("tokens", [1, 32])
def test_a_pull_without_an_answer_ends_when_the_cpu_fails(
    transport: GpuTransport, device: torch.device, tokens: int, rng: torch.Generator
) -> None:
    out = torch.zeros(tokens, SIZE.hidden, device=device)
    transport.arm()
    transport.push(*random_job(rng, tokens, SIZE, resident=0).to(device), 0)  # compiled, and answered
    transport.pull(out)
    torch.cuda.synchronize()
    transport.disarm()
    transport._state[PENDING] = 1
    transport._state[JOB_NUMBER] = 5
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    transport.pull(out)
    done.record()
    time.sleep(0.05)
    assert not done.query(), "it waits"
    threading.Timer(0.05, transport.doorbell.fail, ("The test is over.",)).start()
    ends_soon(lambda: None)
    with pytest.raises(NativeError, match="The test is over"):
        transport.check()


def test_a_step_that_is_not_armed_is_an_error_and_no_hang(transport: GpuTransport, rng: torch.Generator) -> None:
    step = capture(transport, 1, rng)
    ends_soon(lambda: step.run([random_job(rng, 1, SIZE, resident=0) for _ in range(LAYERS)]))
    with pytest.raises(ValueError, match="while none was armed"):
        transport.check()


def test_a_sum_that_is_not_finite_names_its_layer(
    transport: GpuTransport, device: torch.device, rng: torch.Generator
) -> None:
    job = random_job(rng, 2, SIZE, resident=0)
    job.ids[0], job.ids[1] = torch.tensor([0, 1, 2]), torch.tensor([3, 5, -1])
    out = torch.empty(job.x.shape, device=device)
    transport.arm()
    transport.push(*job.to(device), LAYERS)
    transport.pull(out)
    assert out.isnan().any(1).tolist() == [False, True]
    transport.disarm()
    with pytest.raises(NumericsError, match=rf"layer {LAYERS}, row 1 of 2, experts 3, 5\."):
        transport.check()
    transport.check()


def test_the_probe_takes_microseconds(transport: GpuTransport) -> None:
    took_us = transport.probe_us()
    print(f"\n{transport.doorbell.way.name}, an empty round trip: {took_us:.1f} us")  # noqa: T201
    assert 0 < took_us < 1000
    assert transport.counters().jobs == 0


@pytest.mark.parametrize("way", [Way.NUMBER, Way.FLAGS], indirect=True)
def test_a_probe_without_an_answer_is_an_error_with_a_remedy(
    transport: GpuTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a CPU that does not see the ring: pull waits for a number that the CPU never gets."""
    monkeypatch.setattr(transport, "push", lambda *_: transport._state[:2].copy_(torch.tensor([5, 1])))
    begin = time.perf_counter()
    with pytest.raises(NativeError, match=r"did not answer an empty job.* `proa doctor`"):
        transport.probe_us()
    assert time.perf_counter() - begin < 60  # kernels may have to be compiled
    with pytest.raises(NativeError, match="did not answer"):
        transport.check()


@pytest.mark.parametrize("way", [Way.NUMBER], indirect=True)
def test_a_gpu_that_does_not_see_the_cpu_is_an_error_and_no_hang(
    transport: GpuTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    ops = device_ops(other.device)
    blind = replace(ops, poll=lambda _, polls, found: ops.poll(other, min(polls, 1000), found))
    monkeypatch.setattr(transport._way, "_ops", blind)
    with pytest.raises(NativeError, match="does not see what the CPU writes"):
        transport.probe_us()
