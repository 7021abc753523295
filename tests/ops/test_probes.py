"""Side effects of the probes' clocks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from proa.plan.plan import VramBudget

PROBES = Path(__file__).parents[2] / "benchmarks" / "probes"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpu_attention", "gpu_experts", "gpu_linear"])
def test_calls_wait_for_what_was_written_before_them(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a clock made its first call on a stream of its own, so that attention read page numbers that were not
    written yet."""
    monkeypatch.syspath_prepend(PROBES)
    probe = importlib.import_module(name)
    value = torch.zeros(1, device=device)
    seen: list[torch.Tensor] = []
    torch.cuda._sleep(1 << 28)  # a tenth of a second, before the value is written
    value.fill_(1.0)
    probe.microseconds([lambda: seen.append(value.clone())])
    assert seen[0].item() == 1.0


def frames(*lines: str) -> list[dict[str, Any]]:
    """Innermost first, as torch has them."""
    return [{"filename": path, "line": int(line), "name": "f"} for path, _, line in (x.partition(":") for x in lines)]


def test_vram_is_reported_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of torch's allocator, and the driver's share beside it."""
    monkeypatch.syspath_prepend(PROBES)
    probe = importlib.import_module("gpu_memory")
    ours = "/x/site-packages/proa/"

    def block(size: int, *lines: str, asked: int | None = None, state: str = "active_allocated") -> dict[str, Any]:
        return {"size": size, "requested_size": asked or size, "state": state, "frames": frames(*lines)}

    segments = [
        {"total_size": 100, "segment_pool_id": (0, 0), "blocks": [
            block(30, "/x/torch/nn.py:7", f"{ours}hybrid/slots.py:41"), block(20, f"{ours}ops/cuda_linear.py:164"),
            block(16, f"{ours}cache/pool.py:50", asked=15), block(4, f"{ours}ops/cuda_linear.py:45"),
            block(10, f"{ours}engine/executors/graphs.py:78"), block(20, state="inactive"),
        ]},
        {"total_size": 40, "segment_pool_id": (0, 3), "blocks": [block(8, f"{ours}ops/triton/experts.py:46")]},
    ]  # fmt: skip
    found = probe.Found(
        total=1000, driver={"context": 500, "loaded": 510, "ready": 700, "played": 860}, captures=3, captured=60,
        loaded={"ops/cuda_linear.py:164"}, blocks=probe.blocks_of(segments), reserved=140, reserved_by_graphs=40,
    )  # fmt: skip
    vram = VramBudget(
        total_bytes=5000, free_bytes=4000, reserve_bytes=0, context_bytes=600, dense_bytes=21, dense_read_bytes=21,
        kv_bytes=15, workspace_bytes=50, graphs_bytes=100, experts_bytes=30,
    )  # fmt: skip
    assert probe.table(vram, found) == {
        "CUDA": (600, 860 - 60 + 4), "graphs": (100, 60), "dense": (21, 20), "experts": (30, 30),
        "KV and states": (15, 16), "workspace": (50, 140 - 4 - 20 - 30 - 16), "total": (816, 1000),
    }  # fmt: skip
    told = "\n".join(probe.details(found))
    for words in ("3 captured graphs", "engine/executors/graphs.py:78 (workspace)", "hybrid/slots.py:41 (experts)"):
        assert words in told
