"""VRAM for CUDA graphs of prompts: which plans have them, and what they count."""

from __future__ import annotations

from typing import Any

import pytest

from proa.plan import split
from proa.plan.vram import block_graphs_bytes, prompt_graphs_bytes
from unit.vram_cases import QWEN3_30B, gpu, machine, plan


@pytest.mark.parametrize(
    ("gib", "asked", "graphs"),
    [(80, {}, True), (80, {"gpu_experts": "4"}, False), (24, {}, False), (80, {"deterministic": True}, False)],
)
def test_graphs_of_short_prompts_need_all_experts_in_vram(
    gib: int, asked: dict[str, Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, and made, only where prompts are computed whole."""
    got = plan(QWEN3_30B, machine(124, gpu(gib)), context=1024, **asked)
    assert got.gpu is not None
    assert got.gpu.prompt_graphs is graphs
    monkeypatch.setattr(split, "prompt_graphs_bytes", lambda spec, batch_tokens: 0)
    without = plan(QWEN3_30B, machine(124, gpu(gib)), context=1024, **asked)
    assert without.gpu is not None
    assert not without.gpu.prompt_graphs
    more_bytes = got.gpu.vram.workspace_bytes - without.gpu.vram.workspace_bytes
    assert more_bytes == (prompt_graphs_bytes(QWEN3_30B, 512) if graphs else 0)
    assert prompt_graphs_bytes(QWEN3_30B, 512) > 80 << 20


@pytest.mark.parametrize(
    ("gib", "asked", "graphs"),
    [
        (24, {}, True), (80, {"gpu_experts": "4"}, True), (80, {}, False), (24, {"deterministic": True}, False),
        (24, {"prefill": "cpu"}, False), (8, {}, False),
    ],
)  # fmt: skip
def test_graphs_of_blocks_are_for_streamed_prompts(
    gib: int, asked: dict[str, Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are a small part of the VRAM for experts; they are counted."""
    got = plan(QWEN3_30B, machine(124, gpu(gib)), context=1024, **asked)
    assert got.gpu is not None
    assert got.gpu.block_graphs is graphs
    monkeypatch.setattr(split, "GRAPHS_SHARE", 0)
    without = plan(QWEN3_30B, machine(124, gpu(gib)), context=1024, **asked)
    assert without.gpu is not None
    assert not without.gpu.block_graphs
    more_bytes = got.gpu.vram.ring_bytes - without.gpu.vram.ring_bytes
    assert more_bytes == (block_graphs_bytes(QWEN3_30B, 512) if graphs else 0)
    assert block_graphs_bytes(QWEN3_30B, 512) > 90 << 20, "of graphs alone, 3 for each of 48 blocks and 5 sizes"
