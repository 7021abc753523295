"""Deferred pairs through the whole transport, against the experts called directly: a simulated GPU everywhere, a real
one if there is any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bell_cases import Job, Layer, random_job
from deferral_reference import LateTransport
from examples import examples
from proa.errors import NumericsError
from proa.hybrid.transport import HostTransport, Transport
from proa.native.doorbell import DECODE_JOB, JobSize, Service, Way
from proa.native.pool import Pool

SIZE, LAYERS = JobSize(most_tokens=7, top_k=3, hidden=64), 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [Layer(SIZE.hidden, seed) for seed in range(LAYERS)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


def step_of(rng: torch.Generator, tokens: int, size: JobSize, resident: float, padding: int) -> list[Job]:
    """A job for each layer. Rows are padding in all layers or in none."""
    jobs = [random_job(rng, tokens, size, resident) for _ in range(LAYERS)]
    for job in jobs:
        for ids in job.ids:
            if ids[0] < 0:  # a real row has an expert, and each one once
                ids[0] = min(set(range(size.top_k + 1)) - set(ids.tolist()))
        job.ids[tokens - padding :] = -1
        job.up_address[tokens - padding :] = 0
    return jobs


def run(transport: Transport, jobs: list[Job], at: torch.device, first_layer: int = DECODE_JOB) -> torch.Tensor:
    outs = torch.full((len(jobs), *jobs[0].x.shape), torch.nan, device=at)
    transport.arm()
    for layer, (job, out) in enumerate(zip(jobs, outs, strict=True)):
        transport.push(*job.to(at), first_layer + layer)
        transport.pull(out)
    found = outs.cpu()
    transport.disarm()
    transport.check()
    return found


@pytest.mark.parametrize("way", list(Way))
@given(
    deferred=st.integers(0, SIZE.top_k), tokens=st.integers(1, SIZE.most_tokens), seed=st.integers(0, 1000),
    resident=st.sampled_from([0.0, 0.4, 0.9, 1.0]), padding=st.integers(0, 2),
)  # fmt: skip
@settings(max_examples=examples(100), deadline=None)
def test_a_step_has_the_bits_of_the_experts(
    way: Way, deferred: int, tokens: int, seed: int, resident: float, padding: int, layers: list[Layer], pool: Pool
) -> None:
    """Steps of decode, and jobs of prompts between them; rows and whole jobs without a pair on the CPU."""
    rng = torch.Generator().manual_seed(seed)
    experts, service = [layer.experts for layer in layers], Service(lane=1, deferred=deferred)
    transport = HostTransport(pool, experts, SIZE, service, way)
    wanted = LateTransport(pool, experts, SIZE, service)
    for _ in range(3):
        jobs = step_of(rng, tokens, SIZE, resident, min(padding, tokens - 1))
        assert torch.equal(run(transport, jobs, CPU), run(wanted, jobs, CPU))
        prompt = [random_job(rng, SIZE.most_tokens, SIZE)]
        assert torch.equal(run(transport, prompt, CPU, 2), run(wanted, prompt, CPU, 2))
    transport.close()


def test_all_sums_arrive(layers: list[Layer], pool: Pool, rng: torch.Generator) -> None:
    """With equal rows in all layers, the answers of a step add up to the same with and without deferral."""
    experts = [layers[0].experts] * LAYERS
    for tokens in range(1, SIZE.most_tokens + 1):
        job = step_of(rng, tokens, SIZE, 0.4, 0)[0]
        sums = []
        for deferred in range(SIZE.top_k + 1):
            transport = HostTransport(pool, experts, SIZE, Service(deferred=deferred))
            sums.append(run(transport, [job] * LAYERS, CPU).sum(0))
            transport.close()
        for found in sums[1:]:
            torch.testing.assert_close(found, sums[0], rtol=1e-5, atol=1e-5)


def test_a_non_finite_deferred_expert_names_its_layer(pool: Pool, rng: torch.Generator) -> None:
    layers = [Layer(SIZE.hidden, seed, poisoned=(5,) if seed == 1 else ()) for seed in range(3)]
    transport = HostTransport(pool, [layer.experts for layer in layers], SIZE, Service(deferred=1))
    jobs = step_of(rng, 2, SIZE, 0.0, 0)[:3]
    for job in jobs:
        job.ids[:] = torch.tensor([0, 1, 5])
        job.weights[:] = torch.tensor([0.5, 0.3, 0.2])
    with pytest.raises(NumericsError, match=r"layer 1, row 0 of 2, experts 5\."):
        run(transport, jobs, CPU)
    transport.close()


@pytest.mark.parametrize("deferred", [-1, SIZE.top_k + 1])
def test_more_than_a_token_has_is_refused(deferred: int, layers: list[Layer], pool: Pool) -> None:
    with pytest.raises(ValueError, match="can be deferred"):
        HostTransport(pool, [layer.experts for layer in layers], SIZE, Service(deferred=deferred))


@pytest.mark.gpu
@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("tokens", [1, 4, 13, 32])
def test_on_a_gpu(way: Way, tokens: int, pool: Pool, device: torch.device, rng: torch.Generator) -> None:
    from proa.hybrid.gpu_transport import GpuTransport
    from proa.ops.cuda_device import device_ops

    size = JobSize(most_tokens=32, top_k=3, hidden=1024)
    layers = [Layer(size.hidden, seed) for seed in range(LAYERS)]
    experts = [layer.experts for layer in layers]
    for deferred in range(size.top_k + 1):
        service = Service(lane=1, deferred=deferred)
        transport = GpuTransport(pool, experts, size, device, device_ops(device), service, way)
        wanted = LateTransport(pool, experts, size, service)
        for resident in (0.0, 0.4, 0.95, 1.0):
            jobs = step_of(rng, tokens, size, resident, min(2, tokens - 1))
            assert torch.equal(run(transport, jobs, device), run(wanted, jobs, CPU))
        transport.close()
