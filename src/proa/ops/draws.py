"""Inputs and buffers of sampling on a device. Never: kernels, which token is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proa.ops.sizes import LOGIT_BINS, parts_of

BEST, WHOLE, CUT = 0, 1, 2  # kinds of jobs: argmax, the whole distribution, after a cut (top_k, top_p, min_p)
TOO_MANY = -2  # the result for rows with more candidates than there is room for
NO_TOP_K = 2**31 - 1
BINS_PER_NAT = 18.0  # of log-weights below the most likely token; the last of the LOGIT_BINS bins ends below 2**-41


class Masks(NamedTuple):
    """Allowed tokens of J rows: row of[j] of `words`, int32 [M, vocab // 32 + 1], with token t in bit t % 32 of word
    t // 32. of: int32 [J], -1: all tokens are allowed."""

    of: Tensor
    words: Tensor


@dataclass(frozen=True)
class DrawJobs:
    """Sampling parameters of J rows, [J] each, on the device."""

    rows: Tensor  # int32: index of the row in logits and tokens
    kinds: Tensor  # int32: BEST, WHOLE or CUT
    top_k: Tensor  # int32; NO_TOP_K: none
    floors: Tensor  # int32: floor_of(min_p)
    inverses: Tensor  # float64: 1 / temperature
    uniforms: Tensor  # float64 in [0, 1)
    top_p: Tensor  # float64
    min_p: Tensor  # float64
    masks: Masks | None = None  # None: all tokens of all rows are allowed


class DrawSpace:
    """Device buffers that the passes over up to `jobs` rows of `vocab` logits exchange."""

    def __init__(self, jobs: int, vocab: int, most_kept: int, device: torch.device) -> None:
        """most_kept: most candidates of a cut; rows with more are sampled on the CPU."""
        parts = parts_of(vocab)
        self.jobs, self.vocab, self.most_kept = jobs, vocab, most_kept
        self.keys, self.masses = (torch.zeros(jobs, parts, dtype=torch.int64, device=device) for _ in range(2))
        self.counts = torch.zeros(jobs, LOGIT_BINS, dtype=torch.int32, device=device)
        self.unmasked = torch.full((jobs,), -1, dtype=torch.int32, device=device)
        self.found = torch.zeros(jobs, dtype=torch.int32, device=device)
        wide = (torch.zeros(jobs, most_kept, dtype=torch.int64, device=device) for _ in range(3))
        self.kept_keys, self.kept_weights, self.before = wide
        self.ranks = torch.zeros(jobs, most_kept, dtype=torch.int32, device=device)

    def no_masks(self, jobs: int) -> Masks:
        return Masks(self.unmasked[:jobs], self.unmasked)


def floor_of(min_p: float) -> int:
    """The last bin of the histogram that can hold a token which survives min_p."""
    return min(LOGIT_BINS - 1, int(-math.log(min_p) * BINS_PER_NAT) + 1) if min_p > 0.0 else LOGIT_BINS - 1


def inverse_of(temperature: float) -> float:
    """1 / temperature, clamped to a finite value: beyond it, any difference of logits exceeds a weight's resolution."""
    return min(1.0 / temperature, 1e300) if temperature > 0.0 else 1.0
