"""VRAM that a plan sets aside for streamed prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from planned_boxes import FORMATS, GB, Box, planned, published
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, SchedulerOptions

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
