"""Turns of prefill and decode, and the length of prefill steps: by the GPU's size and options."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from proa.errors import ResourceError
from proa.plan.plan import Plan
from unit.vram_cases import DENSE, QWEN3_30B, gpu, machine, plan, row


def planned(gib: float, **asked: Any) -> Plan:
    return plan(QWEN3_30B, machine(124, *([gpu(gib)] if gib else [])), **asked)


@pytest.mark.parametrize(
    ("gib", "asked", "share", "tokens"),
    [
        (0, {}, 0.5, 512),  # CPU only: a layer of a longer step would stall decode
        (8, {}, 0.5, 512),
        (24, {}, 0.5, 2048),
        (40, {}, 0.5, 2048),
        (141, {}, 0.0, 4096),  # the GPU computes all experts
        (141, {"prefill_share": 0.3}, 0.3, 4096),
        (80, {"gpu_experts": "none"}, 0.5, 4096),
        (24, {"prefill_share": 0}, 0.0, 2048),
        (24, {"prefill_share": 0.25}, 0.25, 2048),
        (24, {"max_batch_tokens": 700}, 0.5, 700),
        (24, {"max_batch_tokens": 3, "max_running": 8}, 0.5, 8),
        (24, {"max_running": 3000}, 0.5, 3000),
        (24, {"gpu": "none"}, 0.5, 512),
        (24, {"gpu": "sim:8GiB"}, 0.5, 512),
    ],
)
def test_prefill_share_and_step_length_by_vram(gib: float, asked: dict[str, Any], share: float, tokens: int) -> None:
    got = planned(gib, **asked)
    assert (got.prefill_share, got.max_batch_tokens) == (share, tokens)
    assert row(got, "prefill share")[:2] == (
        f"{asked['prefill_share']:g}" if "prefill_share" in asked else "auto", f"{share:g}"
    )  # fmt: skip
    assert row(got, "tokens per step")[:2] == (str(asked.get("max_batch_tokens", "auto")), str(tokens))


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
    assert (got.prefill_share, got.max_batch_tokens, got.shared_tokens) == (0.0, 2048, 512)
    assert "; 512 while others decode" in row(got, "tokens per step")[2]
