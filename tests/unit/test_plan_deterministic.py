"""--deterministic in the plan: options that it turns off or refuses, and the cells of prompts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proa.errors import UsageError
from proa.machine.cost.turns import GapLimit
from proa.plan import ring
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


@pytest.mark.parametrize(
    ("asked", "streamed_from", "got"),
    [
        ({}, 1024, "auto"),  # 64 FLOP per byte, of 2 bytes per weight, and 128 experts of which 8 compute
        ({"prefill": "stream"}, 1, "stream"),
        ({"prefill": "cpu"}, 0, "cpu"),
        ({"max_batch_tokens": 500}, 496, "auto"),  # whole cells are streamed, however short
        ({"load_format": "dummy", "dummy_format": "int4"}, 288, "auto"),
        ({"gpu": "sim:140GiB"}, 0, ""),  # nothing in RAM
    ],
)
def test_cells_are_streamed_by_their_length(asked: dict[str, Any], streamed_from: int, got: str) -> None:
    made = plan(QWEN3_30B, machine(180, gpu(24)), deterministic=True, **asked)
    assert made.streamed_cell_tokens == streamed_from
    if not got:
        return
    assert row(made, "prefill")[1].startswith(got)
    assert made.prompt_cell_tokens is not None
    assert made.pass_tokens % made.prompt_cell_tokens == 0
    assert (made.pass_tokens > 0) == (streamed_from > 0)
    assert str(streamed_from) in row(made, "deterministic")[2] or not streamed_from


def test_the_rule_depends_on_nothing_measured() -> None:
    """Another PCIe link or number of threads gives the same cells."""
    made = [
        plan(
            QWEN3_30B, machine(180, msgspec.structs.replace(gpu(24), pcie_bytes_per_s=rate)), deterministic=True, **more
        )
        for rate, more in ((64e9, {}), (4e9, {"threads": 1}), (None, {}))
    ]
    assert len({(one.prompt_cell_tokens, one.streamed_cell_tokens) for one in made}) == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_only_prompts_that_run_beside_decode_have_vram_for_it(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ring_bytes(beside_bytes: int) -> int:
        monkeypatch.setattr(ring, "beside_bytes", lambda *args: beside_bytes)
        made = plan(QWEN3_30B, machine(180, gpu(24)), deterministic=deterministic)
        assert made.gpu is not None
        assert made.gpu.ring_bytes > 0
        assert made.prompts_may_run_beside == (not deterministic)
        return made.gpu.vram.ring_bytes

    assert ring_bytes(77 << 20) - ring_bytes(0) == (0 if deterministic else 77 << 20)


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


def test_a_step_that_is_too_small_is_named_as_it_was_asked_for() -> None:
    """A step has at least one token for each of --max-running requests."""
    asked: dict[str, Any] = {"max_batch_tokens": 2, "max_running": 3, "gpu_experts": "8"}
    with pytest.raises(UsageError, match="--max-batch-tokens 2 is less than a page of 16 tokens"):
        plan(QWEN3_30B, machine(180, gpu(24)), deterministic=True, **asked)
