"""Logits of all rows of given texts, whichever executor computes them, with routers that choose all experts. Never:
tests.

A near tie of a router that flips is not an arithmetic error, but would change logits by hundreds of percent.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from engines import Loaded, finish_all, load_decoder, make_engine, request
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.models.spec import Moe
from proa.sampling.rows import Row
from proa.types import Sampling
from tiny import TINY

MOE = [name for name in sorted(TINY) if "experts" in str(TINY[name].config)]
PAGE_TOKENS, PAGES = 4, 128
LIMITS = StepLimits(rows=64, sequences=8, context_tokens=128, page_tokens=PAGE_TOKENS, head_rows=64)
GREEDY = Sampling(max_tokens=1, temperature=0.0)


def all_experts(model: Path) -> dict[str, object]:
    """Config overrides that choose all experts, for a folder or a GGUF file."""
    ffns = [block.ffn for block in load_decoder(model).spec.blocks if isinstance(block.ffn, Moe)]
    if not ffns:
        return {}
    groups = {"topk_group": ffns[0].router.groups.groups} if ffns[0].router.groups else {}
    config = json.loads((model / "config.json").read_text()) if model.is_dir() else {"num_experts_per_tok": 0}
    names = [name for name in ("num_experts_per_tok", "moe_k") if name in config]
    return dict.fromkeys(names, ffns[0].experts) | groups


def rows(model: Loaded, prompts: list[list[int]], answers: list[list[int]], **engine: int) -> Tensor:
    """Logits of all rows with the given answers forced: the same work for every model."""
    made, runner = make_engine(model, **engine)
    for i, (tokens, answer) in enumerate(zip(prompts, answers, strict=True)):
        made.submit(request(f"r{i}", tokens + answer, 1))
    finish_all(made)
    found = [runner.logits[f"r{i}"] for i in range(len(prompts))]
    return torch.stack([seen[position] for seen in found for position in sorted(seen)])


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]


def forced(model: Loaded, texts: list[list[int]], prompt_tokens: list[int]) -> Tensor:
    """Logits of all rows: the prompts of all sequences in one step, then one token each until they end."""
    executor = model.make(LIMITS, PAGES)
    most = -(-LIMITS.context_tokens // PAGE_TOKENS)
    pages = [list(range(i * most // 2, (i + 1) * most // 2)) for i in range(len(texts))]
    found: list[Tensor] = []

    def step(parts: list[tuple[int, int, int]]) -> None:
        """(sequence, from, to)"""
        spans = [Span(texts[i][a:b], a, pages[i], prompt_tokens[i], i) for i, a, b in parts]
        batch = StepBatch(spans, range(len(spans)))
        step = executor.launch(batch)
        executor.sample(step, batch.sampled, [Row(GREEDY, texts[i], prompt_tokens[i]) for i, _, _ in parts])
        result = executor.wait(step)
        found.append(executor.logits_of(step, range(batch.num_tokens)).clone().float())
        last = found[-1][batch.rows_of(batch.sampled)].argmax(-1).tolist()
        assert result.tokens == {i: [token] for i, token in enumerate(last)}

    step([(i, 0, n) for i, n in enumerate(prompt_tokens)])
    for t in range(max(len(text) - n for text, n in zip(texts, prompt_tokens, strict=True))):
        parts = [(i, n + t, n + t + 1) for i, n in enumerate(prompt_tokens) if n + t < len(texts[i])]
        step(parts)
    return torch.cat(found)
