"""Real engines, in processes or in this one, with a GPU, simulated or not, or without one, over tiny checkpoints.
Never: tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import finish_all, request
from fakes import make_tokenizer
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.llm import AsyncLLM
from proa.plan.plan import Plan
from proa.types import Decision
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


def logprobs_after(plan: Plan, tokens: Sequence[int]) -> tuple[list[float], Sequence[Decision]]:
    """The log-probabilities of eight tokens after a prompt, by an engine on the GPU in this process, and the start-up
    table's rows."""
    engine, ready = load_engine(plan, lambda loading: None)
    engine.submit(request("a", list(tokens), 8, logprobs=0))
    found = [one.logprob for event in finish_all(engine)["a"] for one in event.logprobs or []]
    del engine
    torch.cuda.empty_cache()
    return found, ready.decisions
