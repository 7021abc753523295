"""The demo model for tests, built in the same cache and by the same code as for `proa serve demo`. Tests that use it
are marked `demo`.

If its source cannot be downloaded, a test fails with the error's remedy; it is never skipped.
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
    """Return the demo's Qwen2-MoE folder: bfloat16, 12 of 16 experts per token."""
    return locate("demo")


@cache
def demo_gguf() -> Path:
    """Return the dense GGUF from which the demo is built."""
    return locate("demo-dense")


def eval_windows(tokenizer: Any, num_windows: int | None = None) -> torch.Tensor:
    """Return the tokens of the committed evaluation text, int64 [windows, 512]; all 11 windows by default."""
    tokens = torch.tensor(tokenizer(EVAL_TEXT.read_text())["input_ids"])
    whole = len(tokens) // WINDOW_TOKENS
    return tokens[: whole * WINDOW_TOKENS].view(whole, WINDOW_TOKENS)[:num_windows]


@torch.no_grad()
def perplexity(model: Any, windows: torch.Tensor) -> float:
    """Compute the perplexity of a transformers model; windows are independent, and their first token is not scored."""
    total = 0.0
    for window in windows:
        logits = model(window[None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return math.exp(total / (windows.numel() - len(windows)))
