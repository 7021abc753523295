"""How many answers differ when the same prompts are asked again, at several concurrencies, with and without the prefix
cache, by default and with --deterministic.

    python benchmarks/probes/same_answer.py MODEL [--prompts 50] [--times 6] [--tokens 16] [--option KEY=VALUE ...]

Options are those of `proa serve`, as YAML values: --option gpu=0 --option gpu_experts=4. Every second prompt is greedy,
the others are seeded; a third of them share a beginning. An answer is its tokens and their log-probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

import yaml

from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.llm import AsyncLLM
from proa.types import SamplingParams

WORDS = "the quick brown fox jumps over lazy dog while rivers run and mountains stand tall under an old blue sky".split()
LENGTHS = (3, 8, 17, 40, 90, 200, 7, 33)  # words of a prompt
CONCURRENCY = (1, 4, 16)


def make_prompts(count: int) -> list[str]:
    draw = random.Random(1)
    stem = " ".join(draw.choices(WORDS, k=60))
    bodies = [" ".join(draw.choices(WORDS, k=LENGTHS[i % len(LENGTHS)])) for i in range(count)]
    return [f"{stem} {body}" if i % 3 == 0 else body for i, body in enumerate(bodies)]


async def ask_all(llm: AsyncLLM, prompts: list[str], tokens: int, at_once: int, order: int) -> list[str]:
    """An answer for each prompt, asked in an order drawn from a seed."""
    room, answers = asyncio.Semaphore(at_once), [""] * len(prompts)

    async def ask(i: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0 if i % 2 else 1.0, seed=i, logprobs=1)
        async with room:
            choice = (await llm.generate(prompts[i], params)).choices[0]
        answers[i] = f"{choice.tokens} {choice.logprobs}"

    await asyncio.gather(*(ask(i) for i in random.Random(order).sample(range(len(prompts)), len(prompts))))
    return answers


async def count_different(model: str, options: dict[str, Any], prompts: list[str], times: int, tokens: int) -> str:
    """Prompts with more than one answer, over all concurrencies and repetitions, by one engine."""
    llm = await AsyncLLM.launch(model, from_keywords(EngineOptions, **options))
    try:
        await llm.engine.wait_ready()
        seen = [set[str]() for _ in prompts]
        for at_once in CONCURRENCY:
            for time in range(times):
                for found, answer in zip(seen, await ask_all(llm, prompts, tokens, at_once, time), strict=True):
                    found.add(answer)
    finally:
        await llm.close()
    several = sum(len(found) > 1 for found in seen)
    return f"{several} of {len(prompts)} prompts have more than one answer in {times * len(CONCURRENCY)}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    more = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in asked.option)}
    prompts = make_prompts(asked.prompts)
    for deterministic in (True, False):
        for cached in (True, False):
            options = {"max_running": max(CONCURRENCY), "prefix_cache": cached, "deterministic": deterministic, **more}
            result = await count_different(asked.model, options, prompts, asked.times, asked.tokens)
            mode = "--deterministic" if deterministic else "default"
            print(f"{mode}, prefix cache {'on' if cached else 'off'}: {result}", flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
