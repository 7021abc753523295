"""--deterministic in the plan: options that it turns off or refuses, and the cells of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from proa.errors import UsageError
from proa.machine.cost.turns import GapLimit
from unit.vram_cases import QWEN3_30B, gpu, machine, plan, row


@pytest.mark.parametrize(
    ("gib", "asked", "cell"),
    [
        (0, {}, None),
        (0, {"dtype": "float32"}, 512),
        (0, {"dtype": "float32", "max_batch_tokens": 100}, 96),
        (24, {}, 2048),
        (24, {"max_batch_tokens": 1000}, 992),
        (24, {"gpu": "sim:8GiB"}, 512),
        (141, {}, 512),  # prompts never share steps with decode
    ],
)
def test_cells_if_bits_depend_on_the_steps_shape(gib: float, asked: dict[str, Any], cell: int | None) -> None:
    got = plan(QWEN3_30B, machine(180, *([gpu(gib)] if gib else [])), deterministic=True, **asked)
    assert (got.deterministic, got.prompt_cell_tokens, got.max_itl) == (True, cell, GapLimit(factor=2.5))
    assert row(got, "deterministic")[:2] == ("on", "on")


def test_placement_is_static() -> None:
    free, fixed = (plan(QWEN3_30B, machine(180, gpu(24)), deterministic=d) for d in (False, True))
    assert free.gpu is not None
    assert fixed.gpu is not None
    assert (free.gpu.placement, fixed.gpu.placement) == ("dynamic", "uniform")
    assert (free.gpu.co_fetch, fixed.gpu.co_fetch) == (True, False)
    assert free.prompt_cell_tokens is None
    assert row(free, "deterministic")[1] == "off"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"expert_placement": "dynamic"}, "expert_placement"),
        ({"max_itl": "none"}, "max_itl"),
        ({"max_batch_tokens": 8, "gpu_experts": "8"}, "max_batch_tokens"),
    ],
)
def test_conflicting_options_are_refused(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(QWEN3_30B, machine(180, gpu(24)), deterministic=True, **asked)
    assert caught.value.param == param
    assert "--deterministic" in caught.value.message
