"""Logprobs and edits of logits by Triton."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import rand
from proa.ops.draws import WHOLE, DrawSpace
from proa.ops.sizes import EDIT_WORDS, logprobs_keys
from proa.ops.triton.logprobs import row_logprobs
from proa.ops.triton.weights import edit, restore

# Error of float32: the result's rounding, and that of the logits in the sum of weights. Weights are rounded at 2**-41.
EPS = torch.finfo(torch.float32).eps


def explained(
    logits: Tensor, rows: list[int], tokens: list[int], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    logits, vocab = logits.to(device), logits.shape[1]
    space = DrawSpace(len(rows), vocab, 1, device)
    ones = (
        torch.full((len(rows),), WHOLE, dtype=torch.int32, device=device),
        torch.ones(len(rows), dtype=torch.float64, device=device),
    )
    ids = torch.full((len(rows), count), -7, dtype=torch.int32, device=device)
    logprobs = torch.full((len(rows), count + 1), math.nan, device=device)
    row_logprobs(
        logits, torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(tokens, dtype=torch.int32, device=device), ones, space,
        torch.full((logprobs_keys(len(rows), vocab, count),), 2**62, dtype=torch.int64, device=device), ids, logprobs,
    )  # fmt: skip
    return ids.cpu(), logprobs.cpu()


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (50, 0), (50, 50), (2048, 3), (5000, 7), (4097, 16)])
def test_logprobs_of_top_and_sampled_tokens(vocab: int, count: int, rng: torch.Generator, device: torch.device) -> None:
    logits = rand(rng, 4, vocab + 3, dtype=torch.float32)[:, :vocab] * 4 - 30
    logits[:, vocab // 2 :] = logits[:, vocab // 2 :].round()  # equals, in every part
    rows, tokens = [3, 0, 1], [vocab - 1, vocab // 2, -1, 0]
    ids, logprobs = explained(logits, rows, tokens, count, device)
    want = torch.log_softmax(logits.double(), -1)[rows]
    order = torch.sort(logits[rows], descending=True, stable=True).indices[:, :count]
    assert torch.equal(ids.long(), order)
    bound = EPS * (want.gather(-1, order).abs() + 1)
    assert (logprobs[:, 1:].double() - want.gather(-1, order)).abs().le(bound).all()
    for i, row in enumerate(rows):
        if tokens[row] >= 0:
            right = float(want[i, tokens[row]])
            assert abs(float(logprobs[i, 0]) - right) <= EPS * (abs(right) + 1)


def test_edits_match_the_definition_and_are_restored(rng: torch.Generator, device: torch.device) -> None:
    logits = rand(rng, 3, 500, dtype=torch.float32)
    edits, want = [], logits.clone()
    for i in range(400):
        row, token = i % 3, (i * 7) % 500
        repetition, less, plus = (float(f) for f in torch.rand(3, generator=rng) + 0.5)
        plus = -math.inf if i % 10 == 0 else plus
        value = want[row, token]
        value = value / repetition if value > 0 else value * repetition
        want[row, token] = value - torch.tensor(less) + torch.tensor(plus)
        bits = torch.tensor([repetition, less, plus]).view(torch.int32).tolist()
        edits.append([row, token, *bits])
    edits.append([1, 500, 0, 0, 0])  # no such token
    padded = torch.full((3, 503), 7.0)
    padded[:, :500] = logits
    got = padded.to(device)[:, :500]
    table = torch.tensor(edits, dtype=torch.int32, device=device)
    saved = torch.full((len(edits),), math.nan, device=device)
    edit(got, table, saved)
    assert torch.equal(got.cpu(), want)
    restore(got, table, saved)
    assert torch.equal(got.cpu(), logits)
    assert (got.as_strided((3,), (503,), 500) == 7).all()


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="edits must be int32"):
        edit(torch.zeros(1, 5, device=device), torch.zeros(3, EDIT_WORDS, device=device), torch.zeros(3, device=device))
    with pytest.raises(ValueError, match="room for 3 logits"):
        edit(
            torch.zeros(1, 5, device=device), torch.zeros(3, EDIT_WORDS, dtype=torch.int32, device=device),
            torch.zeros(2, device=device),
        )  # fmt: skip
