"""The Triton argmax, exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import rand
from proa.ops import reference
from proa.ops.sizes import argmax_keys
from proa.ops.triton.argmax import argmax


def chosen(logits: Tensor) -> list[int]:
    rows, vocab = logits.shape
    workspace = torch.full((argmax_keys(rows, vocab),), 2**62, device=logits.device)
    out = torch.full((rows,), -7, dtype=torch.int32, device=logits.device)
    argmax(logits, workspace, out)
    return [int(i) for i in out]


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 50), (2, 2048), (2, 4097), (1, 9000), (0, 10)])
@pytest.mark.parametrize("offset", [0, -100, 100])
def test_argmax(rows: int, vocab: int, offset: float, rng: torch.Generator, device: torch.device) -> None:
    logits = (rand(rng, rows, vocab + 3, dtype=torch.float32) + offset)[:, :vocab].to(device)
    assert chosen(logits) == reference.argmax(logits).tolist()


def test_ties_and_non_finite_logits(rng: torch.Generator, device: torch.device) -> None:
    logits = rand(rng, 10, 5000, dtype=torch.float32) - 100
    logits[0, [4999, 700, 2100]] = 50
    logits[1, 4999] = math.inf
    logits[2, 0] = -math.inf
    logits[3, 2500] = math.nan
    logits[4], logits[4, [3, 4000]] = -1, torch.tensor([-0.0, 0.0])
    logits[5], logits[5, [3, 4000]] = -1, torch.tensor([0.0, -0.0])
    logits[6] = torch.finfo(torch.float32).min
    logits[7], logits[7, 17] = 0, 1e-45
    logits[8, 4998] = torch.finfo(torch.float32).max
    logits[9, [17, 18, 3000]] = torch.tensor([-1 - 2**-23, -1, -1 - 2**-23])  # neighbours
    assert chosen(logits.to(device)) == [700, -1, -1, -1, 3, 3, 0, 17, 4998, 18]


@pytest.mark.gpu
def test_argmax_over_a_whole_vocabulary(rng: torch.Generator, device: torch.device) -> None:
    logits = rand(rng, 33, 262144, dtype=torch.float32).to(device)
    assert chosen(logits) == reference.argmax(logits).tolist()


def test_a_workspace_too_small_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="workspace"):
        argmax(
            torch.zeros(2, 4097, device=device),
            torch.zeros(5, dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
