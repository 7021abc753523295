"""Turns of prefill and decode: --max-itl, and the length of prefill steps: by the GPU's size and options."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from proa.errors import ResourceError, UsageError
from proa.machine.cost.turns import GapLimit
from proa.obs.units import format_ms
from proa.plan.plan import Plan
from proa.plan.turns import asked_gap
from unit.vram_cases import DENSE, QWEN3_30B, gpu, machine, plan, row


def planned(gib: float, **asked: Any) -> Plan:
    return plan(QWEN3_30B, machine(124, *([gpu(gib)] if gib else [])), **asked)


@pytest.mark.parametrize(
    ("gib", "asked", "limit", "tokens"),
    [
        (0, {}, "2.5x", 512),  # CPU only: a layer of a longer step would stall decode
        (8, {}, "2.5x", 512),
        (24, {}, "2.5x", 2048),
        (40, {}, "2.5x", 4096),
        (141, {}, "none", 4096),  # the GPU computes all experts
        (141, {"max_itl": "1.5x"}, "1.5x", 4096),
        (141, {"max_itl": "20ms"}, "20.0 ms", 4096),
        (80, {"gpu_experts": "none"}, "2.5x", 8192),
        (80, {"gpu_experts": "none", "deterministic": True}, "2.5x", 4096),
        (80, {"gpu_experts": "none", "prefill": "cpu"}, "2.5x", 4096),
        (80, {"gpu_experts": "none", "max_batch_tokens": 4096}, "2.5x", 4096),
        (24, {"max_itl": "none"}, "none", 2048),
        (24, {"max_itl": "3X"}, "3x", 2048),
        (24, {"max_itl": "0.5s"}, "500 ms", 2048),
        (24, {"max_batch_tokens": 700}, "2.5x", 700),
        (24, {"max_batch_tokens": 3, "max_running": 8}, "2.5x", 8),
        (24, {"max_running": 3000}, "2.5x", 3000),
        (24, {"gpu": "none"}, "2.5x", 512),
        (24, {"gpu": "sim:8GiB"}, "2.5x", 512),
    ],
)
def test_longest_gap_and_step_length_by_vram(gib: float, asked: dict[str, Any], limit: str, tokens: int) -> None:
    got = planned(gib, **asked)
    assert got.max_batch_tokens == tokens
    assert (got.max_itl is None) == (limit == "none")
    assert row(got, "longest gap")[:2] == (asked.get("max_itl", "auto"), limit)
    assert row(got, "tokens per step")[:2] == (str(asked.get("max_batch_tokens", "auto")), str(tokens))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("auto", None), ("none", None), ("2.5x", GapLimit(factor=2.5)), ("10X", GapLimit(factor=10.0)),
        ("80ms", GapLimit(seconds=0.08)), ("80 ms", GapLimit(seconds=0.08)), ("0.5s", GapLimit(seconds=0.5)),
    ],
)  # fmt: skip
def test_values_of_max_itl(text: str, limit: GapLimit | None) -> None:
    assert asked_gap(text) == limit


@pytest.mark.parametrize("text", ["2.5", "80", "x", "-2x", "1e3ms", "80us", "2,5x", "\u0662x", "off", "nan x", "ms"])
def test_values_without_meaning_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as 2\.5x, a time such as 80ms or 0\.5s, auto or none") as caught:
        planned(0, max_itl=text)
    assert text in caught.value.message
    assert caught.value.param == "max_itl"


@pytest.mark.parametrize("text", ["1x", "1.0x", "0.5x", "0x"])
def test_a_factor_leaves_time_for_prompts(text: str) -> None:
    with pytest.raises(UsageError, match=r"Give a factor above 1; the default is 2\.5x") as caught:
        planned(0, max_itl=text)
    assert "no time is left for prompts" in caught.value.message


@pytest.mark.parametrize("text", ["0ms", "0s"])
def test_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no time"):
        planned(0, max_itl=text)


@pytest.mark.parametrize("gib", [0, 24, 141])
def test_a_time_below_the_undisturbed_gap_is_refused(gib: float) -> None:
    """The undisturbed gap is the roof of decode: what memory bandwidth allows. Its remedy is accepted."""
    least_ms = 1e3 / planned(gib).roof.tokens_per_s
    with pytest.raises(ResourceError) as caught:
        planned(gib, max_itl=f"{0.9 * least_ms:.6f}ms")
    message, remedy = caught.value.message, caught.value.remedy
    assert "below the undisturbed gap" in message
    assert f"at least {format_ms(least_ms / 1e3)}" in message
    assert caught.value.param == "max_itl"
    given = remedy.split("such as ")[1].split(",")[0]
    assert planned(gib, max_itl=given).max_itl == GapLimit(seconds=float(given.removesuffix("ms")) / 1e3)
    assert planned(gib, max_itl=f"{1.1 * least_ms:.6f}ms").max_itl is not None


def test_long_steps_take_little_vram() -> None:
    """Rows of long steps take at most 2 % of VRAM, in place of some experts."""
    long, short = planned(24), planned(24, max_batch_tokens=512)
    assert long.gpu is not None
    assert short.gpu is not None
    more = long.gpu.vram.workspace_bytes - short.gpu.vram.workspace_bytes
    assert 0 < more < 0.02 * (24 << 30)
    assert sum(map(len, long.gpu.resident)) < sum(map(len, short.gpu.resident))


def test_asked_experts_shorten_steps() -> None:
    """If experts that were requested leave no room for the rows of long steps, steps are shorter."""
    tokens = []
    for mib in range(12 << 10, 16 << 10, 64):
        with suppress(ResourceError):
            tokens.append(planned(24, gpu_experts="24", vram=mib << 20).max_batch_tokens)
    assert tokens == sorted(tokens)
    assert {512, 2048} <= set(tokens)


def test_a_model_without_experts_shares_steps() -> None:
    got = plan(DENSE, machine(124, gpu(24)))
    assert (got.max_itl, got.max_batch_tokens, got.shared_tokens) == (None, 4096, 512)
    assert "; 512 while others decode" in row(got, "tokens per step")[2]
