"""Jobs of a simulated GPU give the bits of the experts called directly."""

from __future__ import annotations

import time

import pytest
import torch

from bell_cases import Layer, random_job
from native_hooks import kill_worker
from proa.errors import NativeError, NumericsError
from proa.hybrid.transport import HostTransport
from proa.native.doorbell import JobSize, Service, Way
from proa.native.pool import Pool

SIZE = JobSize(most_tokens=7, top_k=3, hidden=64)
CPU = torch.device("cpu")


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("teams", [[[]], [[0]]])
def test_answers_are_the_experts_bit_for_bit(teams: list[list[int]], way: Way, rng: torch.Generator) -> None:
    layers = [Layer(SIZE.hidden, seed) for seed in range(3)]
    with Pool(teams, pin=False) as pool:
        transport = HostTransport(pool, [layer.experts for layer in layers], SIZE, Service(lane=1), way)
        jobs = [
            (i % 3, job, job.exact(pool, layers[i % 3]))
            for i in range(48)
            for job in (random_job(rng, 1 + i % SIZE.most_tokens, SIZE, resident=(0, 0.4, 0.9, 1)[i % 4]),)
        ]
        rang = sum(bool((job.theirs() >= 0).any()) for _, job, _ in jobs)
        assert 0 < rang < len(jobs)
        for _ in range(20):
            transport.arm()
            for layer, job, want in jobs:
                out = torch.full(job.x.shape, torch.nan)
                transport.push(*job.to(CPU), layer)
                transport.pull(out)
                assert torch.equal(out, want)
            transport.disarm()
        transport.check()
        assert transport.counters().jobs == rang * 20
        transport.close()


def test_rows_without_a_pair_on_the_cpu_are_zero(rng: torch.Generator) -> None:
    """A padding row may hold NaN, and y may hold rows of the last job."""
    layer = Layer(SIZE.hidden, 0)
    with Pool([[]], pin=False) as pool:
        transport = HostTransport(pool, [layer.experts], SIZE)
        transport.arm()
        for _ in range(2):
            job = random_job(rng, 4, SIZE, resident=0)
            job.ids[1:3] = -1
            job.ids[0, 0] = job.ids[3, 0] = 2
            job.x[1:3] = torch.nan
            out = torch.full(job.x.shape, torch.nan)
            transport.push(*job.to(CPU), 0)
            transport.pull(out)
            assert torch.equal(out[1:3], torch.zeros(2, SIZE.hidden))
            assert out[0].any()
        transport.disarm()
        transport.check()


@pytest.mark.parametrize("way", list(Way))
def test_a_dead_worker_is_an_error_of_the_step(way: Way, rng: torch.Generator) -> None:
    layer = Layer(SIZE.hidden, 0)
    with Pool([[0]], pin=False) as pool:
        transport = HostTransport(pool, [layer.experts], SIZE, way=way)
        transport.arm()
        kill_worker(pool)
        begin = time.perf_counter()
        out = torch.empty(4, SIZE.hidden)
        with pytest.raises(NativeError, match="worker thread"):  # noqa: PT012
            while time.perf_counter() - begin < 2:
                transport.push(*random_job(rng, 4, SIZE, resident=0).to(CPU), 0)
                transport.pull(out)
                transport.check()
        begin = time.perf_counter()
        for _ in range(50):  # the rest of the step
            transport.push(*random_job(rng, 4, SIZE, resident=0).to(CPU), 0)
            transport.pull(out)
        assert time.perf_counter() - begin < 1
        transport.disarm()


def test_a_sum_that_is_not_finite_names_its_layer(rng: torch.Generator) -> None:
    layers = [Layer(SIZE.hidden, 0), Layer(SIZE.hidden, 1, poisoned=(2,))]
    with Pool([[0]], pin=False) as pool:
        transport = HostTransport(pool, [layer.experts for layer in layers], SIZE)
        job = random_job(rng, 1, SIZE, resident=0)
        job.ids[0] = torch.tensor([5, -1, 2])
        out = torch.empty(1, SIZE.hidden)
        transport.arm()
        for layer in (0, 1):
            transport.push(*job.to(CPU), layer)
            transport.pull(out)
        transport.disarm()
        assert out.isnan().any(), "never scrubbed"
        with pytest.raises(NumericsError, match=r"layer 1, row 0 of 1, experts 5, 2\."):
            transport.check()
        transport.check()


def test_the_first_row_of_many_that_is_not_finite(rng: torch.Generator) -> None:
    """So many rows that all workers check them."""
    size = JobSize(most_tokens=1100, top_k=2, hidden=64)
    layer = Layer(size.hidden, 0, poisoned=(5,))
    with Pool([[0, 0], [0]], pin=False) as pool:
        transport = HostTransport(pool, [layer.experts], size)
        job = random_job(rng, 1100, size, resident=0)
        out = torch.empty(1100, size.hidden)
        transport.arm()
        for bad in ((), (1050, 1077), (0,), (300, 1099)):
            job.ids[job.ids == 5] = -1
            job.ids[list(bad)] = torch.tensor([5, -1])
            transport.push(*job.to(CPU), 0)
            transport.pull(out)
            assert out.isnan().any(1).nonzero().flatten().tolist() == list(bad)
            if bad:
                with pytest.raises(NumericsError, match=rf"layer 0, row {bad[0]} of 1100, experts 5\."):
                    transport.check()
            transport.check()
        transport.disarm()


def test_push_to_a_closed_transport_is_an_error(rng: torch.Generator) -> None:
    with Pool([[]], pin=False) as pool:
        transport = HostTransport(pool, [Layer(SIZE.hidden, 0).experts], SIZE)
        transport.arm()
        transport.close()
        with pytest.raises(ValueError, match="null pointer"):
            transport.push(*random_job(rng, 1, SIZE, resident=0).to(CPU), 0)


def test_a_wrong_layer_is_an_error_of_the_step(rng: torch.Generator) -> None:
    with Pool([[]], pin=False) as pool:
        transport = HostTransport(pool, [Layer(SIZE.hidden, 0).experts], SIZE)
        transport.arm()
        transport.push(*random_job(rng, 1, SIZE, resident=0).to(CPU), 1)
        transport.pull(torch.empty(1, SIZE.hidden))
        with pytest.raises(ValueError, match="layer 1, but there are 1 layers"):
            transport.check()


@pytest.mark.parametrize("way", list(Way))
def test_the_probe_takes_microseconds(way: Way) -> None:
    with Pool([[]], pin=False) as pool:
        transport = HostTransport(pool, [Layer(SIZE.hidden, 0).experts], SIZE, way=way)
        assert 0 < transport.probe_us(50) < 1e6
        assert transport.counters().jobs == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.zeros(2, 64)}, r"x must be bfloat16 \[T, 64\]"),
        ({"x": torch.zeros(2, 60).bfloat16()}, r"x must be bfloat16 \[T, 64\]"),
        ({"x": torch.zeros(8, 64).bfloat16()}, "1 to 7 rows"),
        ({"ids": torch.zeros(2, 3)}, r"ids must be contiguous torch.int32 \[2, 3\]"),
        ({"weights": torch.zeros(3, 2).t()}, r"weights must be contiguous torch.float32 \[2, 3\]"),
        ({"up_address": torch.zeros(2, 2).long()}, r"up_address must be contiguous torch.int64 \[2, 3\]"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(change: dict[str, torch.Tensor], text: str) -> None:
    good = {"x": torch.zeros(2, 64).bfloat16(), "ids": torch.zeros(2, 3).int(), "weights": torch.zeros(2, 3)}
    with Pool([[]], pin=False) as pool:
        transport = HostTransport(pool, [Layer(SIZE.hidden, 0).experts], SIZE)
        with pytest.raises(ValueError, match=text):
            transport.push(**(good | {"up_address": torch.zeros(2, 3).long()} | change), layer=0)
        with pytest.raises(ValueError, match=r"out must be float32 \[T, 64\]"):
            transport.pull(torch.zeros(8, 64))
