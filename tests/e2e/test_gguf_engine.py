"""GGUF files in real engine processes: what the converter changed is changed back on its way into RAM and VRAM, and
answers are those of the folder that the file was made of.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import make_tokenizer
from gpu_llm import GPUS, launched
from proa.types import SamplingParams
from tiny import make_tiny
from tiny_gguf import SAID, make_tiny_gguf

pytestmark = pytest.mark.usefixtures("forked_engines")


async def answer(model: Path, gpu: str, tokenizer: Path) -> list[int]:
    options = {"gpu_experts": "auto"} if gpu == "none" else {}
    async with launched(model, gpu, tokenizer=str(tokenizer), **options) as llm:
        chunks = llm.stream("Hello", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        return [token async for chunk in chunks for token in chunk.tokens]


@pytest.mark.parametrize("gpu", [pytest.param("none", id="cpu"), *GPUS])
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v2", "qwen3-next"])
def test_answers_are_those_of_the_folder(name: str, gpu: str, tmp_path: Path) -> None:
    sizes = {**SAID[name], "vocab_size": 512}
    folder = make_tokenizer(make_tiny(name, tmp_path / "folder", **sizes))
    file = make_tiny_gguf(name, tmp_path / "m.gguf", **sizes)
    assert asyncio.run(answer(file, gpu, folder)) == asyncio.run(answer(folder, gpu, folder))
