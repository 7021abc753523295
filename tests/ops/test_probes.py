"""What the probes' clocks do beside measuring."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

PROBES = Path(__file__).parents[2] / "benchmarks" / "probes"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpu_attention", "gpu_experts", "gpu_linear"])
def test_calls_wait_for_what_was_written_before_them(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that made its first call on a stream of its own had attention follow page numbers not yet written."""
    monkeypatch.syspath_prepend(PROBES)
    probe = importlib.import_module(name)
    value = torch.zeros(1, device=device)
    seen: list[torch.Tensor] = []
    torch.cuda._sleep(1 << 28)  # a tenth of a second, before the value is written
    value.fill_(1.0)
    probe.microseconds([lambda: seen.append(value.clone())])
    assert seen[0].item() == 1.0
