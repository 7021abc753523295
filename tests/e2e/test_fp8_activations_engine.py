"""--fp8-activations in a real engine on a real GPU: prompts are rounded where an expert has such a number of tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import make_tokenizer
from gpu_llm import launched
from ops.fp8_cases import NEEDS_FP8
from proa.types import SamplingParams
from tiny_quantised import SCHEMES, make_quantised

pytestmark = [pytest.mark.gpu, NEEDS_FP8]
# By tokens of a prompt, which is computed as 32, 64, 128 or 256 rows; 3 of 16 experts for each.
ROUNDS = {16: False, 50: True, 100: True, 200: True}


async def scores(folder: Path, fp8: bool) -> list[list[float]]:
    """Log-probabilities of each prompt's tokens. No prompt begins as another does."""
    found = []
    async with launched(folder, "0", gpu_experts="all", fp8_activations=fp8) as llm:
        assert ("fp8 activations" in {row.name for row in llm.plan.decisions}) is fp8
        params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        for tokens in ROUNDS:
            answer = await llm.generate([20 + (tokens + 3 * i) % 400 for i in range(tokens)], params)
            assert len(answer.choices[0].tokens) == 4
            found.append([p.logprob for p in answer.prompt_logprobs or [] if p is not None])
    return found


@pytest.mark.parametrize("name", ["fp8 block", "fp8 rows"])
def test_many_tokens_are_rounded(name: str, tmp_path: Path) -> None:
    """Rounding leaves the score of each token much nearer to its own than to its neighbour's."""
    folder, _ = make_quantised(
        SCHEMES[name], "qwen3-moe", tmp_path / "m", vocab_size=512, moe_intermediate_size=96, num_experts=16
    )
    make_tokenizer(folder)
    both = [asyncio.run(scores(folder, fp8)) for fp8 in (False, True)]
    for (tokens, rounds), exact, rounded in zip(ROUNDS.items(), *both, strict=True):
        assert len(exact) == len(rounded) == tokens - 1
        assert (exact != rounded) is rounds
        own = sum(abs(a - b) for a, b in zip(exact, rounded, strict=True)) / len(exact)
        next_ = sum(abs(a - b) for a, b in zip(exact[1:], rounded[:-1], strict=True)) / (len(exact) - 1)
        assert own < next_ / 3
