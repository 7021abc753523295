"""VRAM for CUDA graphs of prompts: which plans have them, and what they count."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from proa.plan import ring, split
from proa.plan.plan import GpuPlan
from proa.plan.vram import block_graphs_bytes, prompt_graphs_bytes
from unit.vram_cases import QWEN3_30B, gpu, machine, plan


def with_and_without(
    gib: int, asked: dict[str, Any], patch: pytest.MonkeyPatch, *, module: ModuleType, name: str, value: Any
) -> list[GpuPlan]:
    """Plans for a GPU of so many GiB: as it is, and with this name of a module patched to leave graphs out."""
    found = []
    for _ in range(2):
        got = plan(QWEN3_30B, machine(124, gpu(gib)), context=1024, **asked).gpu
        assert got is not None
        found.append(got)
        patch.setattr(module, name, value)
    return found


@pytest.mark.parametrize(
    ("gib", "asked", "graphs"),
    [(80, {}, True), (80, {"gpu_experts": "4"}, False), (24, {}, False), (80, {"deterministic": True}, False)],
)
def test_graphs_of_short_prompts_need_all_experts_in_vram(
    gib: int, asked: dict[str, Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, and made, only where prompts are computed whole."""
    none = lambda spec, batch_tokens: 0  # noqa: E731
    got, without = with_and_without(gib, asked, monkeypatch, module=split, name="prompt_graphs_bytes", value=none)
    assert (got.prompt_graphs, without.prompt_graphs) == (graphs, False)
    more_bytes = got.vram.workspace_bytes - without.vram.workspace_bytes
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
    got, without = with_and_without(gib, asked, monkeypatch, module=ring, name="GRAPHS_SHARE", value=0)
    assert (got.block_graphs, without.block_graphs) == (graphs, False)
    more_bytes = got.vram.ring_bytes - without.vram.ring_bytes
    assert more_bytes == (block_graphs_bytes(QWEN3_30B, 512) if graphs else 0)
    assert block_graphs_bytes(QWEN3_30B, 512) > 90 << 20, "of graphs alone, 3 for each of 48 blocks and 5 sizes"
