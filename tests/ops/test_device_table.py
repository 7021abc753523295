"""The GPU-only ops: the kernels against the reference, for the same inputs. tests/ops/test_triton_*.py have each op's
shapes, limits and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from bell_cases import random_job
from have_gpu import HAVE_GPU
from ops.triton_bounds import rand
from proa.native.doorbell import JobSize, block_layout
from proa.native.pool import Pool
from proa.ops.added import Added
from proa.ops.bell_block import STATE_WORDS, views
from proa.ops.cuda_device import device_ops
from proa.ops.cuda_linear import CudaLinear
from proa.ops.device_reference import device_reference
from proa.ops.device_table import DeviceOps
from proa.ops.draws import BEST, CUT, NO_TOP_K, WHOLE, DrawJobs, DrawSpace, Masks, floor_of, inverse_of
from proa.ops.faults import IDS, LayerFaults, Notes
from proa.ops.residency import IN_PLACE_PAIRS, InPlace, Located, Residency
from proa.ops.sizes import logprobs_keys, mask_words
from proa.ops.staging import Staging
from proa.ops.table import NextRouter, Norm, RouterRule
from proa.ops.triton import bell, look_ahead
from router_cases import ROUTERS

pytestmark = pytest.mark.skipif(HAVE_GPU, reason="kernels are compiled here; the reference runs on the CPU")
CPU = torch.device("cpu")
Run = Callable[[DeviceOps, torch.Generator], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _rings(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter cannot run PTX: a ring stores the number, and a wait is over at once."""

    def ring(rung: Any, number: Any) -> None:
        tl.store(rung, number)

    for module in (bell, look_ahead):
        monkeypatch.setattr(module, "ring", ring)
    monkeypatch.setattr(bell, "_await", lambda answer, number: None)


def locate(ops: DeviceOps, rng: torch.Generator) -> dict[str, Tensor]:
    experts = 11
    here, order = torch.randint(0, 2, (experts,), generator=rng).bool(), torch.arange(1, experts + 1)
    up, down = (torch.where(here, order * step, 0) for step in (64, 128))
    share = torch.arange(IN_PLACE_PAIRS + 1, dtype=torch.int32) // 2
    counts = torch.zeros(experts, dtype=torch.int32)
    places = InPlace(order * 4096, order * 8192, share)
    residency = Residency(up, down, torch.where(here, -1, order).int(), counts, places)
    at = ops.locate(torch.randint(-1, experts, (5, 4), generator=rng).int(), residency)
    return {"up": at.up, "down": at.down, "cpu": at.cpu, "counts": counts}


def job(ops: DeviceOps, rng: torch.Generator) -> dict[str, Tensor]:
    size = JobSize(21, 3, 32)
    layout = block_layout(size)
    memory = torch.zeros(layout.bytes, dtype=torch.uint8)
    block, state = views(memory, layout, size), torch.zeros(STATE_WORDS + 21, dtype=torch.int32)
    block.y.copy_(torch.randn(block.y.shape, generator=rng))
    outs = {}
    for i, resident in enumerate((0.5, 1.0, 0.0)):
        asked = random_job(rng, 19, size, resident)
        ops.push(asked.x, asked.ids, asked.weights, asked.up_address, i, block, state)
        pulled, taken = (torch.full((19, 32), torch.nan) for _ in range(2))
        ops.pull(pulled, block, state)
        ops.take(taken, block, state)
        outs |= {
            f"{i} pulled": pulled,
            f"{i} taken": taken,
            f"{i} state": state.clone(),
            f"{i} rung": block.rung.clone(),
        }
    return outs | {"header": block.header, "ids": block.ids[:19], "weights": block.weights[:19], "x": block.x[:19]}


def foresee(ops: DeviceOps, rng: torch.Generator) -> dict[str, Tensor]:
    experts, hidden, top_k = 24, 64, 3
    size = JobSize(4, top_k, hidden)
    layout = block_layout(size)
    block = views(torch.zeros(layout.bytes, dtype=torch.uint8), layout, size)
    staging = Staging(Pool([()], pin=False), 0, pinned=False)
    router = CudaLinear({"router": experts}, hidden, False, CPU, staging, out=torch.float32)
    assert router.weight is not None
    router.weight.copy_(torch.randn(experts, hidden, generator=rng))
    norm = Norm(torch.ones(hidden, dtype=torch.bfloat16), 1e-6)
    cpu = torch.where(torch.rand(experts, generator=rng) < 0.5, torch.arange(experts), -1).int()
    following = NextRouter(norm, router, RouterRule(top_k, ROUTERS["qwen3"]))
    for layer in (7, 2):
        ops.foresee(rand(rng, 3, hidden), torch.tensor([0, -1, 1]), following, cpu, layer, block)
    return {"told": block.foreseen, "ids": block.foreseen_ids[:3]}


def sums(ops: DeviceOps, rng: torch.Generator) -> dict[str, Tensor]:
    """Row 1 is not finite by expert 2 of the device, row 3 is padding, row 4 by the CPU's sum."""
    tokens, top_k, hidden = 5, 3, 64
    records = torch.zeros(tokens, IDS + top_k, dtype=torch.int32)
    ids = torch.randint(0, 9, (tokens, top_k), generator=rng).int()
    ids[3] = -1
    address = torch.tensor([16, 0, 16]).repeat(tokens, 1)
    partial, weights = torch.randn(tokens * top_k, hidden, generator=rng), torch.rand(tokens, top_k, generator=rng)
    cpu, shared, gate = torch.randn(tokens, hidden, generator=rng), rand(rng, tokens, hidden), rand(rng, tokens, 1)
    partial[1 * top_k + 2, 5] = partial[3 * top_k, 5] = torch.inf
    cpu[4, 9] = torch.nan
    outs = {}
    for name, added in {"plain": Added(), "all": Added(cpu, shared, gate)}.items():
        at, x = Located(ids, address, address, ids), rand(rng, tokens, hidden)
        found = ops.sum_experts(partial, weights, at, added, LayerFaults(Notes(records), 6), x)
        outs[f"{name} added"] = found.add(x.clone())
        total, normed = found.add_norm(x.clone(), Norm(torch.ones(hidden, dtype=torch.bfloat16), 1e-6))
        outs |= {f"{name} total": total, f"{name} normed": normed, f"{name} records": records.clone()}
    total: Tensor | None = None
    at, x = Located(ids, address, address, ids), rand(rng, tokens, hidden)
    for group in range(3):  # experts that are computed one group after the other
        mine = torch.where(torch.arange(top_k) == group, address, 0)
        faults = LayerFaults(Notes(records), 7)
        total = ops.add_experts(partial, weights, Located(at.ids, mine, mine, ids), total, faults, x)
        outs |= {f"sum of {group + 1} groups": total.clone(), f"records of {group + 1} groups": records.clone()}
    return outs


def edits(ops: DeviceOps, rng: torch.Generator) -> dict[str, Tensor]:
    logits, count = torch.randn(4, 50, generator=rng), 9
    table = torch.zeros(count, 5, dtype=torch.int32)
    table[:, 0] = torch.arange(count) % 4
    table[:, 1] = torch.arange(count) * 6  # the last one is beyond the padded vocabulary below
    table[-1, 1] = 50
    table[:, 2:].view(torch.float32).copy_(torch.rand(count, 3, generator=rng) + 0.5)
    saved, before = torch.zeros(count), logits.clone()
    ops.edit(logits, table, saved)
    edited = logits.clone()
    ops.restore(logits, table, saved)
    assert torch.equal(logits, before)
    return {"edited": edited, "saved": saved[:-1]}


def drawn(ops: DeviceOps, rng: torch.Generator) -> dict[str, Tensor]:
    """Each kind of job; the last row keeps more candidates than there is room for."""
    wishes = [(WHOLE, 1.0, 0, 1.0, 0.0), (BEST, 0.0, 0, 1.0, 0.0), (CUT, 0.7, 5, 1.0, 0.0), (CUT, 1.3, 0, 0.8, 0.0)]
    wishes += [(CUT, 1.0, 20, 0.9, 0.1), (CUT, 1.0, 0, 1.0, 0.3), (WHOLE, 0.2, 0, 1.0, 0.0), (CUT, 50.0, 0, 0.999, 0.0)]
    number, vocab = len(wishes), 2100
    words = torch.randint(-(2**31), 2**31, (2, mask_words(vocab)), generator=rng).int()
    kinds, temperatures, top_k, top_p, min_p = zip(*wishes, strict=True)
    jobs = DrawJobs(
        rows=torch.arange(number, dtype=torch.int32), kinds=torch.tensor(kinds, dtype=torch.int32),
        top_k=torch.tensor([k or NO_TOP_K for k in top_k], dtype=torch.int32),
        floors=torch.tensor([floor_of(p) for p in min_p], dtype=torch.int32),
        inverses=torch.tensor([inverse_of(t) for t in temperatures], dtype=torch.float64),
        uniforms=torch.rand(number, generator=rng).double(),
        top_p=torch.tensor(top_p, dtype=torch.float64), min_p=torch.tensor(min_p, dtype=torch.float64),
        masks=Masks(torch.tensor([-1, 1, 0, -1] * 2, dtype=torch.int32), words),
    )  # fmt: skip
    logits, tokens = torch.randn(number + 1, vocab, generator=rng) * 3, torch.zeros(number + 1, dtype=torch.int32)
    tokens[6] = -1
    ops.draw(logits, jobs, True, DrawSpace(number, vocab, 256, CPU), tokens)
    return {"tokens": tokens}


def logprobs(ops: DeviceOps, rng: torch.Generator) -> dict[str, Tensor]:
    rows, vocab, count = 3, 2100, 4
    logits, tokens = torch.randn(5, vocab, generator=rng) * 4, torch.tensor([3, 8, -1, 2099, 0], dtype=torch.int32)
    logits[4, 5:9] = 100.0  # equals: the lowest id first
    ones = torch.full((rows,), WHOLE, dtype=torch.int32), torch.ones(rows, dtype=torch.float64)
    ids, found = torch.zeros(rows, count, dtype=torch.int32), torch.zeros(rows, count + 1)
    workspace = torch.zeros(logprobs_keys(rows, vocab, count), dtype=torch.int64)
    picked = torch.tensor([0, 4, 3], dtype=torch.int32)
    ops.row_logprobs(logits, picked, tokens, ones, DrawSpace(rows, vocab, 1, CPU), workspace, ids, found)
    return {"ids": ids, "logprobs": found}


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # NumPy's, of the interpreter
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("op", [locate, job, foresee, sums, edits, drawn, logprobs])
def test_kernels_give_what_the_reference_gives(op: Run, seed: int) -> None:
    kernels = device_ops(CPU)
    reference = device_reference(kernels.expert_space, kernels.experts)
    got, want = (op(ops, torch.Generator().manual_seed(seed)) for ops in (kernels, reference))
    assert got.keys() == want.keys()
    for name, expected in want.items():
        # Sums of a few float32 terms in another order, stored in bfloat16; logprobs of float64, stored in float32.
        eps = {torch.bfloat16: 2**-7, torch.float32: 2**-20}.get(expected.dtype, 0.0)
        torch.testing.assert_close(
            got[name], expected, rtol=eps, atol=8 * eps * (eps < 2**-7), equal_nan=True, msg=name
        )
