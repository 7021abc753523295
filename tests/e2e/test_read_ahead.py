"""What idle workers read ahead changes no token: engines that do, and do not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpu_llm import GPUS, launched, make_model
from proa.engine.stats import Stats
from proa.types import SamplingParams

pytestmark = pytest.mark.usefixtures("forked_engines")

PROMPTS = [[20 + 7 * i, 3, 5 + i] for i in range(3)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


async def decoded(folder: Path, gpu: str, word: str) -> tuple[list[list[int]], Stats]:
    async with launched(folder, gpu, expert_placement="uniform", co_fetch="off", read_ahead=word) as llm:
        answers = [await llm.generate(prompt, PARAMS) for prompt in PROMPTS]  # one by one: batches are the same
        assert llm.engine.stats is not None
        return [answer.choices[0].tokens for answer in answers], llm.engine.stats


@pytest.mark.parametrize("gpu", GPUS)
def test_tokens_are_the_same(gpu: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    off, nothing = asyncio.run(decoded(folder, gpu, "off"))
    on, stats = asyncio.run(decoded(folder, gpu, "auto"))
    assert on == off
    assert nothing.cpu_experts.foreseen == 0 < nothing.cpu_experts.needed
    assert 0 < stats.cpu_experts.foreseen <= stats.cpu_experts.needed
