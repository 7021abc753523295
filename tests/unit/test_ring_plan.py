"""VRAM that a plan sets aside for streamed prompts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from planned_boxes import FORMATS, GB, Box, planned, published
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, SchedulerOptions
from proa.errors import ResourceError
from proa.ops import sizes
from proa.plan.plan import Plan
from proa.plan.ring import LEAST_EXPERTS, MOST_SHARE

GIB = 1 << 30


@pytest.mark.parametrize("vram_gib", [16, 24, 140])
def test_a_long_prompt_takes_little_vram(vram_gib: int, tmp_path: Path) -> None:
    """65536 tokens pass through the layers of Qwen3-30B-A3B together, with at most 3 GiB for workspace and ring."""
    box = Box(4350 * GB, 150 * GB, vram_gib=vram_gib)
    asked = EngineOptions(
        cache=CacheOptions(context=65600), scheduler=SchedulerOptions(max_running=4),
        gpus=GpuOptions(gpu_experts="none"),
    )  # fmt: skip
    config = published("Qwen/Qwen3-30B-A3B", FORMATS["int4"][0]) | {"max_position_embeddings": 131072}
    plan = planned(tmp_path, config, box.machine, asked, isa="amx").plan
    gpu = plan.gpu
    assert gpu is not None
    assert plan.pass_tokens >= 65536
    assert gpu.vram.workspace_bytes + gpu.vram.ring_bytes <= 3 * GIB


MODELS = {"30B": "Qwen/Qwen3-30B-A3B", "235B": "Qwen/Qwen3-235B-A22B", "V3": "deepseek-ai/DeepSeek-V3"}


def plan_of(
    folder: Path, model: str, form: str, vram_gib: int, experts: str, *, ram_gib: int = 4 << 10, prefill: str = "auto"
) -> Plan:  # fmt: skip
    box = Box(900 * GB, 150 * GB, vram_gib=vram_gib)
    machine = msgspec.structs.replace(box.machine, total_bytes=ram_gib * GIB, available_bytes=ram_gib * GIB)
    asked = EngineOptions(gpus=GpuOptions(gpu_experts=experts, prefill=prefill))
    return planned(folder, published(MODELS[model], FORMATS[form][0]), machine, asked, isa="amx").plan


@pytest.mark.parametrize(
    ("model", "form", "vram_gib", "experts"),
    [
        ("30B", "int4", 12, "60"),
        ("30B", "bf16", 12, "10"),
        ("30B", "bf16", 12, "none"),
        ("235B", "int4", 12, "none"),
        ("235B", "int4", 24, "10"),
        ("V3", "fp8", 32, "none"),
    ],
)
def test_experts_asked_for_leave_room_for_the_ring(
    model: str, form: str, vram_gib: int, experts: str, tmp_path: Path
) -> None:
    """With a number of experts asked for, the KV cache took all other VRAM, and the CPU computed prompts alone."""
    plan, without = (plan_of(tmp_path, model, form, vram_gib, experts, prefill=prefill) for prefill in ("auto", "cpu"))
    gpu = plan.gpu
    assert gpu is not None
    count = 0 if experts == "none" else int(experts)
    assert gpu.ring_bytes >= sizes.RING_BANKS * LEAST_EXPERTS * max(gpu.expert_bytes)
    assert [len(ids) for ids in gpu.resident] == [count] * len(gpu.resident)
    assert gpu.placement == ("dynamic" if count else "uniform")
    assert gpu.vram.used_bytes <= gpu.vram.usable_bytes
    assert plan.context_tokens >= 0.6 * without.context_tokens


def test_vram_that_no_expert_is_wanted_in_is_for_the_ring(tmp_path: Path) -> None:
    """The ring had at most a quarter of what KV had left, although --gpu-experts none left the rest unused."""
    gpu = plan_of(tmp_path, "30B", "bf16", 12, "none").gpu
    assert gpu is not None
    assert gpu.ring_bytes >= 0.9 * MOST_SHARE * gpu.vram.usable_bytes


@given(
    model=st.sampled_from([("30B", "int4"), ("30B", "bf16"), ("235B", "int4"), ("V3", "fp8")]),
    vram_gib=st.integers(6, 60), experts=st.sampled_from(["auto", "none", "1", "3", "17", "60", "all"]),
    ram_gib=st.integers(40, 800),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_no_plan_exceeds_the_vram(model: tuple[str, str], vram_gib: int, experts: str, ram_gib: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan = plan_of(Path(folder), *model, vram_gib, experts, ram_gib=ram_gib)
        except ResourceError:
            return
    if (gpu := plan.gpu) is None:  # the CPU computes everything
        return
    assert gpu.vram.used_bytes <= gpu.vram.usable_bytes
    assert (plan.pass_tokens > 0) == (gpu.ring_bytes > 0)
    if experts not in ("auto", "all") and gpu.ring_bytes == 0:
        unused_bytes = gpu.vram.usable_bytes - gpu.vram.used_bytes
        assert unused_bytes < MOST_SHARE * gpu.vram.usable_bytes
