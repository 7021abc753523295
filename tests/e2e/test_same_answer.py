"""The demo gives equal answers to equal requests: alone and in a batch, with and without the prefix cache."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from demo_model import demo_moe

PROMPTS, TIMES, TOKENS = 8, 1, 6
PROBE = Path(__file__).parents[2] / "benchmarks/probes/same_answer.py"


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_answer", PROBE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.seldom
@pytest.mark.demo
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_demo_gives_equal_answers(probe: ModuleType, deterministic: bool) -> None:
    """Holds on a CPU with bfloat16 weights also without --deterministic: see docs/reproducibility.md."""
    prompts = probe.make_prompts(PROMPTS)
    options = {"max_running": 16, "deterministic": deterministic, "gpu": "none", "context": 1024}
    found = asyncio.run(probe.count_different(str(demo_moe()), options, prompts, TIMES, TOKENS))
    assert found == f"0 of {PROMPTS} prompts have more than one answer in {3 * TIMES}"
