"""--deferred-experts in the plan: refusals, the table's row, the key of kept KV pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proa.config.options import EngineOptions, GpuOptions, ModelOptions
from proa.engine.building.tiers import tiers_root
from proa.errors import UsageError
from proa.models.spec import Model
from proa.plan.plan import Plan
from quick_plan import prepare
from tiny import make_tiny
from unit import test_vram
from unit.vram_cases import DENSE, MIXTRAL, QWEN3_30B, row


def plan(spec: Model = QWEN3_30B, gib: float = 24, **asked: Any) -> Plan:
    return test_vram.plan(spec, test_vram.machine(124, test_vram.gpu(gib)), **asked)


@pytest.mark.parametrize("asked", [{}, {"deterministic": True}, {"gpu_experts": "none"}])
def test_row(asked: dict[str, Any]) -> None:
    got = plan(deferred_experts=3, **asked)
    assert got.gpu is not None
    assert got.gpu.deferred == 3
    _, shown, why = row(got, "deferred experts")
    assert shown == "3 of 8"
    assert "lossy" in why
    assert "KL" in why


def test_off_without_a_row() -> None:
    got = plan()
    assert got.gpu is not None
    assert got.gpu.deferred == 0
    assert "deferred experts" not in [decision.name for decision in got.decisions]


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"gpu": "none"}, "no GPU is used"),
        ({"gib": 80, "gpu_experts": "all"}, "no layer of some/model has experts in RAM"),
        ({"spec": DENSE}, "no layer of some/model has experts in RAM"),
        ({"gpu_resident_layers": "0-46", "gpu_experts": "none", "gib": 80}, "only one layer of some/model"),
        ({"spec": MIXTRAL, "gib": 40}, "more than the 2 experts of a token"),
    ],
)
def test_refused(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match) as refused:
        plan(deferred_experts=3, **asked)
    assert refused.value.remedy


def test_as_many_as_a_token_has() -> None:
    got = plan(deferred_experts=8).gpu
    assert got is not None
    assert got.deferred == 8


def test_engines_share_kept_pages_only_with_the_same_number(tmp_path: Path) -> None:
    """KV pages of generated tokens depend on what was deferred."""
    folder = str(make_tiny("qwen3-moe", tmp_path))
    roots = []
    for deferred in (0, 1, 2, 1):
        gpus = GpuOptions(gpu="sim:64MiB", gpu_experts="3", deferred_experts=deferred)
        prepared = prepare(folder, EngineOptions(ModelOptions(dtype="bfloat16"), gpus=gpus))
        roots.append(tiers_root(prepared.plan, prepared.checkpoint, []))
    assert len(set(roots)) == 3
    assert roots[1] == roots[3]
