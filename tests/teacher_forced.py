"""Logits of all rows of given texts, whichever executor computes them, with routers that choose all experts. Never:
tests.

A near tie of a router that flips is not an arithmetic error, but would change logits by hundreds of percent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines import Loaded, finish_all, load_decoder, make_engine, request
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.executor import Executor
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


@dataclass(frozen=True)
class Computed:
    """Logits of all rows of all sequences, in their order, and by name what their tokens left in the caches."""

    logits: Tensor
    cached: dict[str, Tensor]


class Turns:
    """Two sequences decode, alone by turns and together, also between the parts of a third one's prompt and of a
    fourth one's. All their tokens are given."""

    LENGTHS, PROMPTS = (40, 34, 91, 45), (7, 4, 75, 31)
    ROWS, ROWS_IN_PARTS = 48, 96  # most of a whole step, and of a step in parts

    def __init__(self, executor: Executor[Any]) -> None:
        self._executor = executor
        self._texts, self._done = prompts(list(self.LENGTHS)), [0] * len(self.LENGTHS)
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._steps = 0

    @classmethod
    def limits(cls, *, in_chunks: bool) -> StepLimits:
        """in_chunks: a step in parts may have more rows than are computed at once."""
        return replace(LIMITS, rows=cls.ROWS if in_chunks else cls.ROWS_IN_PARTS, pass_rows=cls.ROWS_IN_PARTS)

    def run(self) -> Computed:
        for sequence in (0, 1):
            self._finish([(sequence, self.PROMPTS[sequence])])
        for sequence in (2, 3):
            self._in_parts(sequence)
            for _ in range(4):
                self._decode(range(sequence + 1))
        while self._left(range(4)):
            self._decode(range(4))
        logits = [self._rows[i, at] for i, length in enumerate(self.LENGTHS) for at in range(length)]
        return Computed(torch.stack(logits), self._cached())

    def _left(self, sequences: Sequence[int]) -> list[int]:
        return [i for i in sequences if self._done[i] < self.LENGTHS[i]]

    def _decode(self, sequences: Sequence[int]) -> None:
        """One token each of those that have tokens left; of only one of them in every other step, whose experts may be
        read in place. The last tokens of all are left for the end."""
        self._steps += 1
        if left := self._left(sequences):
            chosen = left if self._steps % 2 else [left[self._steps // 2 % len(left)]]
            self._finish([(i, 1) for i in chosen])

    def _batch(self, counts: Sequence[tuple[int, int]]) -> StepBatch:
        """counts: (sequence, tokens)."""
        each = -(-LIMITS.context_tokens // PAGE_TOKENS)
        spans = []
        for i, count in counts:
            tokens = self._texts[i][self._done[i] : self._done[i] + count]
            spans.append(Span(tokens, self._done[i], list(range(i * each, (i + 1) * each)), self.PROMPTS[i], i))
            self._done[i] += count
        return StepBatch(spans)

    def _finish(self, counts: Sequence[tuple[int, int]]) -> None:
        batch = self._batch(counts)
        self._take(batch, self._executor.launch(batch))

    def _in_parts(self, sequence: int) -> None:
        batch = self._batch([(sequence, self.PROMPTS[sequence])])
        step = self._executor.launch_in_parts(batch)
        while not self._executor.advance(step, 1):
            self._decode((0, 1))
        self._take(batch, step)

    def _take(self, batch: StepBatch, step: Any) -> None:
        self._executor.sample(step, (), ())
        assert self._executor.wait(step).faults == {}
        rows = range(batch.num_tokens)
        parts = [self._executor.logits_of(step, rows[at : at + LIMITS.head_rows]).float().cpu().clone()
                 for at in range(0, len(rows), LIMITS.head_rows)]  # fmt: skip
        every = iter(torch.cat(parts))
        for span in batch.spans:
            for at in range(span.start, span.start + len(span.tokens)):
                self._rows[span.state, at] = next(every)

    def _cached(self) -> dict[str, Tensor]:
        """KV of all tokens, and the recurrent states after the last ones."""
        each = -(-LIMITS.context_tokens // PAGE_TOKENS)
        found: dict[str, list[Tensor]] = defaultdict(list)
        for cache in (cache for layer in self._executor.caches for cache in layer):
            for number, pages in enumerate(cache.page_tensors):
                for i, length in enumerate(self.LENGTHS):
                    tokens = pages[i * each : (i + 1) * each].flatten(0, 1)[:length]
                    found[f"pages {number}"].append(tokens.float().cpu().flatten())
            for number, states in enumerate(cache.states):
                found[f"states {number}"].append(states[: len(self.LENGTHS)].float().cpu().flatten())
        return {name: torch.cat(parts) for name, parts in found.items()}
