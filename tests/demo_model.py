"""The demo model in tests: the same cache, the same code as `proa serve demo`. A test that uses it is marked `demo`.

If its source cannot be fetched the test fails with the remedy; it is never skipped.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from proa.hub.locate import locate

EVAL_TEXT = Path(__file__).parent / "data" / "demo_eval.txt"
WINDOW_TOKENS = 512


@cache
def demo_moe() -> Path:
    """The Qwen2-MoE folder: bfloat16, top 12 of 16."""
    return locate("demo")


@cache
def demo_gguf() -> Path:
    """The dense GGUF that it is made of."""
    return locate("demo-dense")


def eval_windows(tokenizer: Any, num_windows: int | None = None) -> torch.Tensor:
    """The committed evaluation text, int64 [windows, 512]; all 11 of them by default."""
    tokens = torch.tensor(tokenizer(EVAL_TEXT.read_text())["input_ids"])
    whole = len(tokens) // WINDOW_TOKENS
    return tokens[: whole * WINDOW_TOKENS].view(whole, WINDOW_TOKENS)[:num_windows]


@torch.no_grad()
def perplexity(model: Any, windows: torch.Tensor) -> float:
    """Of a transformers model; every window by itself, its first token given."""
    total = 0.0
    for window in windows:
        logits = model(window[None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return math.exp(total / (windows.numel() - len(windows)))
