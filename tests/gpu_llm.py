"""Real engine processes, with a GPU, simulated or not, or without one, over tiny checkpoints. Never: tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fakes import make_tokenizer
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.llm import AsyncLLM
from tiny import make_tiny

GPUS = [
    pytest.param("sim:256MiB", id="sim"),
    pytest.param("0", id="cuda", marks=pytest.mark.gpu),
]
RESIDENT = 4  # of 8 experts: 0 to 3 of each layer


def make_model(folder: Path, **overrides: Any) -> Path:
    """Tiny Qwen3-MoE with a tokenizer."""
    return make_tokenizer(make_tiny("qwen3-moe", folder, vocab_size=512, **overrides))


def poison(folder: Path, layer: int, expert: int) -> None:
    """Weights of one expert so large that what it computes is not finite; NaN itself would not be loaded."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for part in ("up", "down"):
        tensors[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"] *= 1e30
    save_file(tensors, path, {"format": "pt"})


@asynccontextmanager
async def launched(folder: Path, gpu: str, **options: Any) -> AsyncIterator[AsyncLLM]:
    """gpu: as --gpu; none: everything on the CPU."""
    split = {} if gpu == "none" else {"gpu_experts": str(RESIDENT)}
    asked = {"dtype": "bfloat16", "gpu": gpu, "context": 256, **split}
    asked |= {"plan_trial": "off", **options}  # what is computed does not depend on earlier starts
    llm = await AsyncLLM.launch(folder, from_keywords(EngineOptions, **asked))
    try:
        await llm.engine.wait_ready()
        yield llm
    finally:
        await llm.close()
