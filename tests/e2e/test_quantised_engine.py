"""Quantised checkpoints in real engine processes: planned, kept as they are, answering, on the CPU and beside a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import make_tokenizer
from gpu_llm import GPUS, launched
from proa.types import SamplingParams
from tiny_quantised import SCHEMES, make_quantised

pytestmark = pytest.mark.usefixtures("forked_engines")

FORMATS = {"fp8 block": "fp8_panel", "gptq": "int4_f16", "nvfp4": "nvfp4"}


async def answer(folder: Path, gpu: str, **options: str) -> tuple[dict[str, int], list[int]]:
    """Bytes of weights by format, and the tokens of an answer."""
    async with launched(folder, gpu, **options) as llm:
        ready = await llm.engine.wait_ready()
        chunks = llm.stream("Hello", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        tokens = [token async for chunk in chunks for token in chunk.tokens]
        return dict(ready.formats), tokens


@pytest.mark.parametrize("gpu", [pytest.param("none", id="cpu"), *GPUS])
@pytest.mark.parametrize("name", FORMATS)
def test_answers(name: str, gpu: str, tmp_path: Path) -> None:
    folder, _ = make_quantised(SCHEMES[name], "qwen3-moe", tmp_path / "m", vocab_size=512, moe_intermediate_size=96)
    options = {"gpu_experts": "auto"} if gpu == "none" else {}
    formats, tokens = asyncio.run(answer(make_tokenizer(folder), gpu, **options))
    assert len(tokens) == 8
    assert formats[FORMATS[name]] > 0
