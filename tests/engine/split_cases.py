"""Requests of engines whose experts are split over GPU and CPU. Never: tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines import Loaded, RecordingRunner, finish_all, make_engine, request
from proa.engine.engine import Engine
from proa.types import TokenEvent


def run(
    model: Loaded, texts: dict[str, list[int]], answers: tuple[int, ...], engine: dict[str, int], **wishes: object
) -> tuple[Engine, RecordingRunner, dict[str, list[TokenEvent]]]:
    made, runner = make_engine(model, **engine)
    for (name, tokens), count in zip(texts.items(), answers, strict=True):
        made.submit(request(name, tokens, count, **wishes))
    return made, runner, finish_all(made)


def logits_of(model: Loaded, texts: dict[str, list[int]], wanted: dict[str, list[int]]) -> Tensor:
    """Logits of these positions, with the texts computed as prompts."""
    ones = (1,) * len(texts)
    _, runner, _ = run(model, texts, ones, {"num_pages": 256, "max_running": len(texts), "max_batch_tokens": 512})
    return torch.stack([runner.logits[name][position] for name in texts for position in wanted[name]])


DRAWS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 7, "logprobs": 3},
    {"repetition_penalty": 1.3, "min_p": 0.05}, {"presence_penalty": 1.0, "temperature": 0.0},
    {"min_tokens": 30, "stop_token_ids": (3, 4, 5)}, {"logit_bias": {9: 5.0}, "frequency_penalty": 0.7, "logprobs": 0},
]  # fmt: skip
