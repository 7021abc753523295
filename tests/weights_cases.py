"""Shared steps of the tests of weights/: open, declare and load a checkpoint into fresh tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from proa.models.names import Declared
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights


def fresh_targets(declared: Declared, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Targets filled with NaN, which reveals unwritten elements."""
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in declared.spec.params()}


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path, **options)
    declared = checkpoint.declare()
    targets = fresh_targets(declared, dtype)
    load_weights(checkpoint, declared, targets, lambda done, total: None)
    return targets


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Equal names and equal bits."""
    assert got.keys() == want.keys()
    wrong = [name for name in want if not torch.equal(got[name], want[name])]
    assert not wrong
