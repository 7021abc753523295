"""Models whose routers have sigmoids, corrections and groups, and whose first layers are dense, in real engine
processes: planned, loaded or filled at random, answering, on the CPU and beside a GPU.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import make_tokenizer
from gpu_llm import GPUS, launched
from proa.types import SamplingParams
from tiny import make_tiny

pytestmark = pytest.mark.usefixtures("forked_engines")


async def answer(folder: Path, gpu: str, **options: str) -> list[int]:
    async with launched(folder, gpu, **options) as llm:
        chunks = llm.stream("Hello", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        return [token async for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("gpu", [pytest.param("none", id="cpu"), *GPUS])
@pytest.mark.parametrize("load", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["glm4-moe-groups", "minimax-m2"])
def test_answers(name: str, load: str, gpu: str, tmp_path: Path) -> None:
    folder = make_tokenizer(make_tiny(name, tmp_path / "m", vocab_size=512))
    options = {"gpu_experts": "auto"} if gpu == "none" else {}
    tokens = asyncio.run(answer(folder, gpu, load_format=load, **options))
    assert len(tokens) == 8
