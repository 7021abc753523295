"""Engines on each device sample the same tokens as proa.sampling from the same logits. The head's weights are zero and
logit biases make the distribution, so that logits are bitwise equal on every device."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_llm import GPUS, launched, make_model
from proa.sampling.choose import choose
from proa.sampling.rows import Row
from proa.text.answer import Answer
from proa.types import Sampling, SamplingParams

pytestmark = pytest.mark.usefixtures("forked_engines")

VOCAB, PROMPT, ANSWER_TOKENS = 512, [5, 9, 9, 70], 12
BIASES = {token: 6 * torch.rand((), generator=torch.Generator().manual_seed(token)).item() for token in range(VOCAB)}
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5, "logprobs": 5},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8, "logprobs": 0},
    "min_p": {"min_p": 0.3},
    "all cuts": {"temperature": 1.4, "top_k": 200, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"temperature": 0.4, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "greedy, never twice": {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "logprobs": 1},
}


def headless(folder: Path) -> Path:
    """Make a tiny model whose logits are all 0."""
    made = make_model(folder)
    (path,) = made.glob("*.safetensors")
    tensors = load_file(path)
    tensors["lm_head.weight"].zero_()
    save_file(tensors, path, {"format": "pt"})
    return made


def expected(seed: int, wishes: dict[str, Any]) -> list[int]:
    s = Sampling(max_tokens=ANSWER_TOKENS, logit_bias=BIASES, seed=seed, **wishes)
    tokens = list(PROMPT)
    for _ in range(ANSWER_TOKENS):
        tokens.append(choose([0], [Row(s, tokens, len(PROMPT))], torch.zeros(1, VOCAB))[0].token)
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("gpu", GPUS)
def test_seeded_answers_are_those_of_the_cpu(gpu: str, tmp_path: Path) -> None:
    """All sampling parameters in one batch, each twice, with different seeds."""

    def params(seed: int, wishes: dict[str, Any]) -> SamplingParams:
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        return SamplingParams(
            max_tokens=ANSWER_TOKENS, ignore_eos=True, logit_bias=BIASES, seed=seed, **{**neutral, **wishes}
        )

    async def go() -> list[Answer]:
        async with launched(headless(tmp_path / "tiny"), gpu, max_running=32) as llm:
            return await asyncio.gather(
                *(llm.generate(PROMPT, params(seed, wishes)) for seed in (3, 44) for wishes in WISHES.values())
            )

    answers = iter(asyncio.run(go()))
    for seed in (3, 44):
        for name, wishes in WISHES.items():
            choice = next(answers).choices[0]
            assert choice.tokens == expected(seed, wishes), name
            if (count := wishes.get("logprobs")) is not None:
                assert [p.token for p in choice.logprobs or []] == choice.tokens
                flat = -torch.tensor(float(VOCAB)).log().item()
                assert all(p.logprob == pytest.approx(flat, abs=1e-5) for p in choice.logprobs or [])
                assert all(len(p.top) == count for p in choice.logprobs or [])
