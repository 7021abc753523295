"""The prediction equals the choice of the next layer's own kernel from the same row, in the CPU's numbering.

In the interpreter, which cannot run PTX, a ring stores the number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from have_gpu import HAVE_GPU
from ops.choose_outputs import EPS, poisoned
from proa.native.doorbell import JobSize, block_layout
from proa.ops.bell_block import BellBlock, views
from proa.ops.residency import Residency
from proa.ops.table import Norm, RouterRule
from proa.ops.triton import look_ahead as kernels
from proa.ops.triton.choose import RouterRows, choice_space, choose
from proa.ops.triton.look_ahead import MOST_ROWS, LookSpace, look_ahead, look_space
from router_cases import ROUTERS


@pytest.fixture(autouse=True)
def _rings(monkeypatch: pytest.MonkeyPatch) -> None:
    def ring(rung: Any, number: Any) -> None:
        tl.store(rung, number)

    if not HAVE_GPU:
        monkeypatch.setattr(kernels, "ring", ring)


def block_of(top_k: int, hidden: int, device: torch.device) -> BellBlock:
    size = JobSize(MOST_ROWS, top_k, hidden)
    layout = block_layout(size)
    return views(torch.full((layout.bytes,), 77, dtype=torch.uint8, device=device), layout, size)


def weights(experts: int, width: int, rng: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    weight = torch.randint(-64, 64, (width,), generator=rng).div(64).to(torch.bfloat16).to(device)
    return weight, (torch.randn(experts, width, generator=rng) * width**-0.5).to(torch.bfloat16).to(device)


RULES = [
    (64, 8, RouterRule(2, ROUTERS["qwen3"])),
    (96, 60, RouterRule(4, ROUTERS["plain"])),
    *((64, 24, RouterRule(3, ROUTERS[name])) for name in ("minimax-m2", "deepseek-v2", "deepseek-v3")),
]


BIASED = RULES if HAVE_GPU else RULES[:2]  # the interpreter takes long


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("width", "experts", "rule", "biased"), [*((*of, False) for of in RULES), *((*of, True) for of in BIASED)]
)
def test_predictions_equal_the_next_layers_choice(
    width: int, experts: int, rule: RouterRule, rows: int, biased: bool, rng: torch.Generator, device: torch.device
) -> None:
    if rule.router.correction:
        rule = RouterRule(rule.top_k, rule.router, torch.randn(experts, generator=rng).to(device))
    block, space = block_of(rule.top_k, width, device), look_space(device)
    named = 0
    for message in range(1, 4):
        weight, router = weights(experts, width, rng, device)
        bias = torch.randn(experts, generator=rng).to(torch.bfloat16).to(device) if biased else None
        x = torch.randn(rows, width + 16, generator=rng).to(torch.bfloat16).to(device)[:, :width]
        slots = torch.arange(rows, device=device)
        slots[rows - 1] = -1 if message == 3 else 0
        numbers = torch.randperm(experts, generator=rng).to(torch.int32)
        cpu = torch.where(torch.rand(experts, generator=rng) < 0.3, -1, numbers).to(torch.int32).to(device)
        norm, of = Norm(weight, EPS, 1.0), RouterRows(router, bias)
        look_ahead(x, norm, of, rule, slots, cpu, 5 + message, block, space)
        seen = Residency(*(torch.zeros(experts, dtype=torch.int64, device=device) for _ in range(2)), cpu)
        out = poisoned(rows, width, rule.top_k, device)
        choose(x, torch.zeros_like(x), norm, of, slots, rule, seen, choice_space(device), out)
        assert block.foreseen.tolist() == [message, 5 + message, rows]
        assert torch.equal(block.foreseen_ids[:rows], out.at.cpu)
        named += int((block.foreseen_ids[:rows] >= 0).sum())
        assert space.state.tolist() == [message, *(0,) * (1 + MOST_ROWS)]  # counters are reset
    assert named > 0


def refused(**wrong: Tensor) -> dict[str, Tensor]:
    right = {
        "x": torch.zeros(2, 64, dtype=torch.bfloat16), "slots": torch.zeros(2, dtype=torch.int64),
        "cpu": torch.zeros(8, dtype=torch.int32), "router": torch.zeros(8, 64, dtype=torch.bfloat16),
    }  # fmt: skip
    return right | wrong


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"x": torch.zeros(5, 64, dtype=torch.bfloat16)}, "at most"),
        ({"x": torch.zeros(2, 64)}, "x must be bfloat16"),
        ({"router": torch.zeros(8, 48, dtype=torch.bfloat16)}, "the router must be"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots must be"),
        ({"cpu": torch.zeros(8, dtype=torch.int64)}, "cpu must be"),
    ],
)
def test_unsupported_arguments_are_refused(wrong: dict[str, Tensor], text: str, device: torch.device) -> None:
    of = {name: tensor.to(device) for name, tensor in refused(**wrong).items()}
    space: LookSpace = look_space(device)
    norm = Norm(torch.ones(64, dtype=torch.bfloat16, device=device), EPS, 0.0)
    rule = RouterRule(2, ROUTERS["qwen3"])
    block = block_of(2, 64, device)
    with pytest.raises(ValueError, match=text):
        look_ahead(of["x"], norm, RouterRows(of["router"]), rule, of["slots"], of["cpu"], 0, block, space)
