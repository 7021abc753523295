"""push and pull in Triton's interpreter, which cannot run the PTX that rings and waits: here a ring stores the number,
and waiting checks that it was answered. tests/hybrid tests the whole protocol on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from bell_cases import random_job
from have_gpu import HAVE_GPU
from proa.native.doorbell import DECODE_JOB, JobSize, block_layout
from proa.ops.added import Added
from proa.ops.bell_block import JOB_NUMBER, STATE_WORDS, Bell, BellBlock, views
from proa.ops.residency import Located, Residency
from proa.ops.table import Norm, RouterRule
from proa.ops.triton import bell, choose
from proa.ops.triton.expert_sum import ExpertSum
from router_cases import ROUTERS

pytestmark = pytest.mark.skipif(
    HAVE_GPU, reason="kernels are compiled here; tests/hybrid/test_gpu_transport.py runs them"
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[int]:
    """The numbers that pull waited for."""
    numbers: list[int] = []

    def ring(rung: Any, number: Any) -> None:
        tl.store(rung, number)

    def wait(answer: Any, number: Any) -> None:
        numbers.append(int(number.handle.data.item()))

    monkeypatch.setattr(bell, "ring", ring)
    monkeypatch.setattr(bell, "_await", wait)
    return numbers


def block_of(size: JobSize) -> tuple[BellBlock, torch.Tensor]:
    layout = block_layout(size)
    block = views(torch.zeros(layout.bytes, dtype=torch.uint8), layout, size)
    for part in (block.ids, block.weights, block.x, block.y):
        part.fill_(77)
    return block, torch.zeros(STATE_WORDS + size.most_tokens, dtype=torch.int32)


# One program; several; more tiles than programs; rows longer than a tile; widths that are no power of two.
@pytest.mark.parametrize(
    ("tokens", "hidden", "top_k"), [(1, 64, 3), (3, 48, 1), (8, 64, 2), (21, 32, 3), (37, 16, 2), (9, 2500, 6)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_push_and_pull(
    waits: list[int],
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    hidden: int,
    top_k: int,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(bell, "MOST_PROGRAMS", 3)
    size = JobSize(tokens + 2, top_k, hidden)
    block, state = block_of(size)
    for number, (resident, layer) in enumerate(
        [(0.5, 3), (0.0, -1), (0.9, 2), (0.9, DECODE_JOB), (1.0, DECODE_JOB)], 1
    ):
        job = random_job(rng, tokens, size, resident)
        job.ids[0, 0], job.up_address[0, 0] = 1, int(resident == 1)  # one pair at least is the CPU's, or must ring
        x = torch.empty(tokens, hidden + 8, dtype=torch.bfloat16)[:, :hidden].copy_(job.x)
        bell.push(x, job.ids.to(dtype), job.weights, job.up_address, layer, block, state)
        theirs = job.theirs()
        pairs = (theirs >= 0).sum(1).int()
        if layer >= DECODE_JOB:
            pairs = pairs.maximum(((job.ids >= 0) | (job.up_address != 0)).any(1).int())
        rows = pairs > 0
        assert block.rung.item() == number
        assert block.header.tolist() == [layer, tokens, number]
        assert torch.equal(block.ids[:tokens], theirs)
        assert torch.equal(block.weights[:tokens], job.weights)
        assert torch.equal(block.x[:tokens][rows], job.x[rows])
        assert torch.equal(state[STATE_WORDS:][:tokens], pairs)
        assert state[:STATE_WORDS].tolist() == [number, 1, 0, 0]
        block.y.normal_(generator=rng)
        out = torch.full((tokens, hidden), torch.nan)
        bell.pull(out, block, state)
        assert torch.equal(out, block.y[:tokens].where(rows[:, None], 0))
        assert set(waits) == {number}
        waits.clear()


def same_parts(block: BellBlock, other: BellBlock, rows: torch.Tensor) -> None:
    for name in ("rung", "header", "ids", "weights"):
        assert torch.equal(getattr(block, name), getattr(other, name)), name
    assert torch.equal(block.x[: len(rows)][rows], other.x[: len(rows)][rows])


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_the_fused_choose_kernel_pushes_like_push(
    waits: list[int], rng: torch.Generator, tokens: int, device: torch.device
) -> None:
    """The fused kernel hands over the same pairs as push, also with no pair for the CPU, and with a padding row."""
    experts, top_k, hidden = 12, 3, 64
    size = JobSize(tokens, top_k, hidden)
    (block, state), (other, other_state) = block_of(size), block_of(size)
    slots = torch.arange(tokens)
    slots[1:2] = -1
    space, rule = choose.choice_space(device), RouterRule(top_k, ROUTERS["qwen3"])
    for layer, resident in ((3, 0.5), (4, 0.0), (5, 1.0), (6, 0.8), (DECODE_JOB, 0.8), (DECODE_JOB + 1, 1.0)):
        mine = torch.rand(experts, generator=rng) < resident
        up = torch.where(mine, 64, 0)
        numbers = torch.where(mine, -1, torch.arange(experts)).int()
        x, y, normal = (torch.randn(n, hidden, generator=rng).bfloat16() for n in (tokens, tokens, 1))
        out = poisoned_choice(tokens, hidden, top_k)
        residency = Residency(up, up, numbers, bell=Bell(block, state, layer))
        router = torch.randn(experts, hidden, generator=rng).bfloat16()
        choose.choose(x, y, Norm(normal[0], 1e-6), choose.RouterRows(router), slots, rule, residency, space, out)
        bell.push(out.normed, out.at.cpu, out.weights, out.at.up, layer, other, other_state)
        rows = (out.at.cpu >= 0).any(1)
        rung = bool(rows.any()) or layer >= DECODE_JOB
        assert rung == (resident == 0 or layer >= DECODE_JOB) or 0 < resident < 1, "by chance"
        if rung:
            same_parts(block, other, rows)
        assert torch.equal(state, other_state)
        sums = ExpertSum(torch.randn(tokens * top_k, hidden, generator=rng), out.weights, out.at.down, Added())
        block.y.normal_(generator=rng)
        other.y.copy_(block.y)
        pulled = torch.full((tokens, hidden), torch.nan)
        bell.pull(pulled, other, other_state)
        waits.clear()
        want = replace(sums, added=Added(pulled)).total()
        assert torch.equal(replace(sums, added=Added(Bell(block, state, layer))).total(), want)
        assert set(waits) == ({int(state[JOB_NUMBER])} if rung else set())


def poisoned_choice(rows: int, width: int, top_k: int) -> choose.ChooseOutputs:
    def full(dtype: torch.dtype, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), 77, dtype=dtype)

    at = Located(*(full(dtype, top_k) for dtype in (torch.int32, torch.int64, torch.int64, torch.int32)), True)
    normed = full(torch.bfloat16, width)
    return choose.ChooseOutputs(normed.clone(), normed, full(torch.float32, top_k), at)


def test_combine_refuses_to_wait_for_too_many_rows(rng: torch.Generator) -> None:
    size = JobSize(12, 2, 2048)
    block, state = block_of(size)
    weights, address = torch.ones(9, 2), torch.zeros(9, 2, dtype=torch.int64)
    sums = ExpertSum(torch.zeros(18, 2048), weights, address, Added(Bell(block, state, 0)))
    with pytest.raises(ValueError, match="use pull instead"):
        sums.total()


@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_nothing_for_the_cpu_rings_nothing(waits: list[int], rng: torch.Generator, tokens: int) -> None:
    size = JobSize(tokens, 2, 32)
    block, state = block_of(size)
    for resident in (0.5, 1.0, 0.5):
        before = block.rung.item()
        job = random_job(rng, tokens, size, resident)
        job.ids[-1, 0], job.up_address[-1, 0] = 1, int(resident == 1.0)
        bell.push(job.x, job.ids, job.weights, job.up_address, 0, block, state)
        out = torch.full((tokens, 32), torch.nan)
        waits.clear()
        bell.pull(out, block, state)
        assert block.rung.item() == before + (resident < 1)
        assert bool(waits) == (resident < 1)
        assert bool(out.any()) == (resident < 1)


def test_a_row_that_is_not_handed_over_is_not_written(waits: list[int], rng: torch.Generator) -> None:
    size = JobSize(4, 2, 32)
    block, state = block_of(size)
    job = random_job(rng, 4, size, resident=0)
    job.ids[1:3] = -1
    job.ids[0, 0] = job.ids[3, 0] = 0
    job.x[1:3] = torch.nan
    bell.push(job.x, job.ids, job.weights, job.up_address, 0, block, state)
    assert (block.x[1:3] == 77).all()
    assert not waits


def test_numbers_go_on_beyond_31_bits(waits: list[int], rng: torch.Generator) -> None:
    size = JobSize(1, 1, 16)
    block, state = block_of(size)
    state[JOB_NUMBER] = 2**31 - 1
    job = random_job(rng, 1, size, resident=0)
    job.ids[:] = 0
    bell.push(job.x, job.ids, job.weights, job.up_address, 0, block, state)
    assert block.rung.item() == -(2**31)
