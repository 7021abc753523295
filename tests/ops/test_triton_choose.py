"""The fused choose kernel: sums and norms against float64, logits against float64 of its own norm, the choice and
locations against the separate kernels on its own logits.

A norm is rounded once to bfloat16, and its sum of n squares has an error of n roundings of float32; so have n products.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from have_gpu import HAVE_GPU
from ops.choose_outputs import EPS, poisoned
from ops.triton_bounds import EPS32, assert_within, stored
from proa.ops.residency import IN_PLACE_PAIRS, InPlace, Residency
from proa.ops.table import Norm, RouterRule
from proa.ops.triton.choose import ChoiceSpace, ChooseOutputs, RouterRows, choice_space, choose
from proa.ops.triton.locate import locate
from proa.ops.triton.route import route
from router_cases import ROUTERS


def some_residency(experts: int, top_k: int, rng: torch.Generator, device: torch.device) -> Residency:
    """A third of the experts are on the GPU; most others can be read in place, and half of a step's misses are."""
    mine = torch.rand(experts, generator=rng) < 0.33
    up, down, here_up, here_down = (torch.randint(1, 1 << 40, (experts,), generator=rng) for _ in range(4))
    cpu = torch.where(mine, -1, torch.arange(experts)).to(torch.int32)
    readable = torch.rand(experts, generator=rng) < 0.8
    share = torch.arange(IN_PLACE_PAIRS + 1, dtype=torch.int32) // 2
    here = InPlace(*(torch.where(readable, of, 0).to(device) for of in (here_up, here_down)), share.to(device))
    tables = (torch.where(mine, of, 0).to(device) for of in (up, down))
    return Residency(*tables, cpu.to(device), torch.zeros(experts, dtype=torch.int32, device=device), here)


def case(rows: int, width: int, experts: int, rng: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    x, y = (torch.randn(rows, width, generator=rng).to(torch.bfloat16).to(device) for _ in range(2))
    weight = torch.randint(-64, 64, (width,), generator=rng).div(64).to(torch.bfloat16).to(device)  # + 1 is exact
    router = (torch.randn(experts, width, generator=rng) * width**-0.5).to(torch.bfloat16).to(device)
    return x, y, weight, router


RULES = [
    (64, 8, RouterRule(2, ROUTERS["qwen3"])),
    (96, 60, RouterRule(4, ROUTERS["plain"])),
    (256, 128, RouterRule(8, ROUTERS["qwen3"])),
    *((64, 24, RouterRule(3, ROUTERS[name])) for name in ("minimax-m2", "deepseek-v2", "deepseek-v3")),
]
if HAVE_GPU:  # rows that take several warps; the interpreter takes long
    RULES += [(5120, 60, RouterRule(4, ROUTERS["plain"])), (7168, 120, RouterRule(3, ROUTERS["deepseek-v3"]))]


BIASED = RULES if HAVE_GPU else RULES[:2]  # the interpreter takes long


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("width", "experts", "rule", "biased"), [*((*of, False) for of in RULES), *((*of, True) for of in BIASED)]
)
def test_as_step_by_step(
    rows: int, width: int, experts: int, rule: RouterRule, biased: bool, rng: torch.Generator, device: torch.device
) -> None:
    x, y, weight, router = case(rows, width, experts, rng, device)
    if rule.router.correction:
        rule = replace(rule, correction=(torch.randn(experts, generator=rng) * 0.3).to(device))
    bias = torch.randn(experts, generator=rng).to(torch.bfloat16).to(device) if biased else None
    residency = some_residency(experts, rule.top_k, rng, device)
    slots = torch.arange(rows, device=device)
    if rows > 1:
        slots[1] = -1
    before, space = x.clone(), choice_space(device)
    for call in range(2):  # the second finds what the first left
        out = poisoned(rows, width, rule.top_k, device)
        offset = float(call)
        choose(x, y, Norm(weight, EPS, offset), RouterRows(router, bias), slots, rule, residency, space, out)
        here = replace(residency, counts=None, in_place=residency.in_place if rows == 1 else None)
        _check(out, space, x, y, weight + offset, RouterRows(router, bias), slots, rule, here)
        assert residency.counts is not None
        assert int(residency.counts.sum()) == (call + 1) * int((slots >= 0).sum()) * rule.top_k
        assert not space.arrived.any()
    assert torch.equal(x, before)


def _check(
    out: ChooseOutputs, space: ChoiceSpace, x: Tensor, y: Tensor, weight: Tensor, router: RouterRows, slots: Tensor,
    rule: RouterRule, residency: Residency,
) -> None:  # fmt: skip
    (rows, width), experts = x.shape, len(router.weight)
    total = (x.float() + y.float()).to(torch.bfloat16)
    assert torch.equal(out.total, total)
    exact = total.double() * torch.rsqrt(total.double().pow(2).mean(1, keepdim=True) + EPS) * weight.double()
    assert_within(out.normed, exact, stored(exact) + exact.abs() * (width + 8) * EPS32)
    logits, given = space.logits[:rows, :experts], out.normed.double()
    products, sizes = given @ router.weight.double().T, given.abs() @ router.weight.double().abs().T
    if router.bias is not None:
        products, sizes = products + router.bias.double(), sizes + router.bias.double().abs()
    assert_within(logits, products, (width + 8) * EPS32 * sizes)
    step = poisoned(rows, width, rule.top_k, x.device)
    route(logits.contiguous(), slots, rule, step.at.ids, step.weights)
    locate(step.at.ids, residency, step.at)
    assert_within(out.weights, step.weights.double(), 8 * EPS32 * step.weights)  # compilers fuse what they like
    for name in ("ids", "up", "down", "cpu"):
        assert torch.equal(getattr(out.at, name), getattr(step.at, name)), name


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy's, in the interpreter
def test_a_nan_row_chooses_valid_experts(rng: torch.Generator, device: torch.device) -> None:
    x, y, weight, router = case(2, 64, 8, rng, device)
    x[1, 3] = float("nan")
    out = poisoned(2, 64, 2, device)
    rule, residency = RouterRule(2, ROUTERS["qwen3"]), some_residency(8, 2, rng, device)
    slots, space = torch.arange(2, device=device), choice_space(device)
    choose(x, y, Norm(weight, EPS), RouterRows(router), slots, rule, residency, space, out)
    assert out.weights[0].isfinite().all()
    assert out.weights[1].isnan().all()
    assert ((out.at.ids >= 0) & (out.at.ids < 8)).all()


def test_unsupported_arguments_are_refused(rng: torch.Generator, device: torch.device) -> None:
    residency, space = some_residency(8, 2, rng, device), choice_space(device)

    def call(rows: int = 1, width: int = 64, top_k: int = 2, room: int = 2) -> None:
        x, y, weight, router = case(rows, width, 8, rng, device)
        slots, out = torch.arange(rows, device=device), poisoned(rows, width, room, device)
        rule = RouterRule(top_k, ROUTERS["qwen3"])
        choose(x, y, Norm(weight, EPS), RouterRows(router), slots, rule, residency, space, out)

    call()
    for wrong in ({"rows": 5}, {"width": 16384}, {"top_k": 9, "room": 9}, {"room": 3}):
        with pytest.raises(ValueError, match=r"at most|outputs per pair"):
            call(**wrong)


@pytest.mark.gpu
def test_same_result_in_a_graph(rng: torch.Generator) -> None:
    device, rule = torch.device("cuda"), RouterRule(8, ROUTERS["qwen3"])
    x, y, weight, router = case(4, 2048, 128, rng, device)
    residency, space, slots = some_residency(128, 8, rng, device), choice_space(device), torch.arange(4, device=device)
    plain, replayed = (poisoned(4, 2048, 8, device) for _ in range(2))

    def run(out: ChooseOutputs) -> None:
        choose(x, y, Norm(weight, EPS), RouterRows(router), slots, rule, residency, space, out)

    run(plain)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            run(replayed)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(plain.normed, replayed.normed)
    assert torch.equal(plain.weights, replayed.weights)
    assert torch.equal(plain.at.ids, replayed.at.ids)
    assert not space.arrived.any()
