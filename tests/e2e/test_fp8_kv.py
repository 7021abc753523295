"""--kv-dtype fp8 in real engine processes: planned, and with the checkpoint's scales, on the CPU and beside a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_llm import GPUS, launched, make_model
from proa.types import SamplingParams

pytestmark = pytest.mark.usefixtures("forked_engines")


def scale_all(folder: Path, value: float) -> None:
    """Add one scale for K and V of every layer."""
    (path,) = folder.glob("*.safetensors")
    names = [f"model.layers.{i}.self_attn.{side}_proj.{side}_scale" for i in range(3) for side in "kv"]
    save_file(load_file(path) | {name: torch.tensor(value) for name in names}, path, {"format": "pt"})


async def scores(folder: Path, gpu: str, kv: str) -> tuple[str, list[float]]:
    """The type in the plan, and log-probabilities of the tokens of a prompt."""
    options = {"gpu_experts": "auto"} if gpu == "none" else {}
    async with launched(folder, gpu, kv_dtype=kv, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        chunks = [chunk async for chunk in llm.stream("Hello there, how are you this morning?", params)]
        found = [p.logprob for chunk in chunks for p in chunk.prompt_logprobs or [] if p is not None]
        return llm.plan.kv_dtype, found


@pytest.mark.parametrize("gpu", [pytest.param("none", id="cpu"), *GPUS])
def test_scales_reach_the_cache(gpu: str, tmp_path: Path) -> None:
    """Some that suit change little; with some that cut off nearly all, prompts are scored quite otherwise."""
    folder = make_model(tmp_path / "m")
    dtype, wide = asyncio.run(scores(folder, gpu, "auto"))
    assert dtype == "bfloat16"
    scale_all(folder, 2.0**-6)
    dtype, suited = asyncio.run(scores(folder, gpu, "fp8"))
    assert dtype == "float8_e4m3fn"
    scale_all(folder, 2.0**-18)
    _, cut = asyncio.run(scores(folder, gpu, "fp8"))
    little, much = (max(abs(a - b) for a, b in zip(wide, other, strict=True)) for other in (suited, cut))
    assert 0 < little < much / 3
