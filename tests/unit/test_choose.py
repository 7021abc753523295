"""Sampling tokens on the CPU, as the engine calls it."""

from __future__ import annotations

import torch

from proa.sampling.choose import choose
from proa.sampling.rows import Row
from proa.types import Sampling

GREEDY = Sampling(max_tokens=9, temperature=0.0)
TOLD = Sampling(max_tokens=9, temperature=0.0, logprobs=1)
BIASED = Sampling(max_tokens=9, temperature=0.0, logit_bias={3: 50.0})


NOTHING = torch.empty(0)  # looking at a row of it is an error


def row(sampling: Sampling) -> Row:
    return Row(sampling, [1, 2], 2)


def test_greedy_rows_and_broken_ones_need_no_logits() -> None:
    found = choose([4, -1, -1, -1], [row(GREEDY), row(GREEDY), row(TOLD), row(BIASED)], NOTHING)
    assert [(c.token, c.logprob) for c in found] == [(4, None), (-1, None), (-1, None), (-1, None)]


def test_rows_that_want_more_get_it() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 0.0], [float("nan")] * 4, [0.0, 1.0, 9.0, 0.0], [0.0, 1.0, 9.0, 0.0]])
    found = choose([2, -1, 2, 2], [row(GREEDY), row(TOLD), row(TOLD), row(BIASED)], logits)
    assert [c.token for c in found] == [2, -1, 2, 3]
    assert [c.logprob is None for c in found] == [True, True, False, True]
    told = found[2].logprob
    assert told is not None
    want = float(torch.log_softmax(logits[2].double(), -1)[2])
    assert told.token == 2
    assert abs(told.logprob - want) <= 4 * torch.finfo(torch.float32).eps
    assert told.top == [(2, told.logprob)]
