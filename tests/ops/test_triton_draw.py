"""The Triton sampler against the definition and the CPU's sampler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from ops.triton_bounds import rand
from proa.ops.draws import BEST, CUT, NO_TOP_K, TOO_MANY, WHOLE, DrawJobs, DrawSpace, floor_of, inverse_of
from proa.ops.sizes import MOST_KEPT
from proa.ops.triton import draw as kernels
from proa.sampling.rows import Row
from proa.sampling.sampler import sample
from proa.types import Sampling


def wish(seed: int = 0, **wishes: Any) -> Sampling:
    return Sampling(max_tokens=100, seed=seed, **wishes)


def jobs_of(wishes: Sequence[Sampling], uniforms: Sequence[float], device: torch.device) -> DrawJobs:
    def column(dtype: torch.dtype, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    kinds = [
        BEST if s.temperature == 0 else CUT if s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 else WHOLE for s in wishes
    ]
    return DrawJobs(
        rows=column(torch.int32, list(range(len(wishes)))),
        kinds=column(torch.int32, kinds),
        top_k=column(torch.int32, [s.top_k or NO_TOP_K for s in wishes]),
        floors=column(torch.int32, [floor_of(s.min_p) for s in wishes]),
        inverses=column(torch.float64, [inverse_of(s.temperature) for s in wishes]),
        uniforms=column(torch.float64, list(uniforms)),
        top_p=column(torch.float64, [s.top_p for s in wishes]),
        min_p=column(torch.float64, [s.min_p for s in wishes]),
    )


def drawn(
    logits: Tensor, wishes: Sequence[Sampling], uniforms: Sequence[float], device: torch.device,
    most_kept: int = MOST_KEPT,
) -> list[int]:  # fmt: skip
    logits, jobs = logits.to(device), jobs_of(wishes, uniforms, device)
    space = DrawSpace(len(wishes), logits.shape[1], most_kept, device)
    for left in vars(space).values():  # left over from an earlier call
        if isinstance(left, Tensor):
            left.fill_(-7)
    tokens = torch.zeros(len(wishes), dtype=torch.int32, device=device)
    kernels.draw(logits, jobs, bool((jobs.kinds == CUT).any()), space, tokens)
    return [int(t) for t in tokens]


def defined(logits: Tensor, s: Sampling, uniform: float) -> int:
    """The definition of sampling, written out; the lowest id first among equals."""
    log = (logits - logits.max()).double() / s.temperature
    if s.top_k == 0 and s.top_p == 1.0 and s.min_p == 0.0:
        order = torch.arange(len(log))
    else:
        order = torch.sort(log, descending=True, stable=True).indices
    probs = torch.softmax(log, -1)[order]
    if s.top_k:
        order, probs = order[: s.top_k], probs[: s.top_k]
    kept = probs.cumsum(0) - probs < s.top_p * probs.sum() if s.top_p < 1.0 else torch.ones(len(probs), dtype=bool)
    kept &= probs >= s.min_p * probs.max()
    kept[0] |= s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0
    sums = (probs * kept).cumsum(0)
    return int(order[min(int((sums <= uniform * sums[-1]).sum()), len(order) - 1)])


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1e-45},
    {"temperature": 1e-30, "top_p": 0.5},
]
NUMBERS = [0.0, 0.13, 0.4999, 1 - 2**-53]  # no sum of equals ends there, which rounding could move


@pytest.mark.parametrize("vocab", [1, 50, 2048, 4100])
def test_the_token_of_the_cpu(vocab: int, rng: torch.Generator, device: torch.device) -> None:
    """All kinds of jobs in one batch: with a cut, from the whole distribution, argmax."""
    cuts = CUTS * 3 if vocab < 100 or device.type == "cuda" else CUTS[::3]
    wishes = [wish(seed, **cut) for seed, cut in enumerate(cuts)]
    logits = rand(rng, len(wishes), vocab + 3, dtype=torch.float32)[:, :vocab] * 3 - 20
    rows = [Row(s, [0], 1) for s in wishes]
    assert drawn(logits, wishes, [row.uniform() for row in rows], device) == sample(logits, rows)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_ends_of_the_distribution(number: float, rng: torch.Generator, device: torch.device) -> None:
    """Numbers at its edges, few different logits: equals on both sides of every cut, the lowest id first."""
    wishes = [wish(**cut) for cut in CUTS if cut.get("temperature") != 0.0]
    logits = torch.randint(-3, 3, (len(wishes), 300), generator=rng).float()
    want = [defined(row, s, number) for row, s in zip(logits, wishes, strict=True)]
    assert drawn(logits, wishes, [number] * len(wishes), device) == want


def test_all_logits_equal(device: torch.device) -> None:
    wishes = [wish(), wish(top_k=7), wish(top_p=0.5), wish(min_p=0.5), wish(temperature=0.0)]
    logits = torch.full((5, 64), -3.25)
    assert drawn(logits, wishes, [0.999] * 5, device) == [63, 6, 31, 63, 0]


def test_forbidden_tokens_are_never_sampled(device: torch.device) -> None:
    logits = torch.full((3, 2500), -math.inf)
    logits[:, [17, 2400]] = torch.tensor([1.0, 0.5])
    wishes = [wish(), wish(top_k=2000), wish(top_p=0.9999999)]
    assert drawn(logits, wishes, [1 - 2**-53] * 3, device) == [2400] * 3
    assert drawn(logits, wishes, [0.0] * 3, device) == [17] * 3


def test_non_finite_rows_are_not_sampled(device: torch.device) -> None:
    """The argmax kernel has marked them with -1; other rows of the batch are unaffected."""
    logits = torch.zeros(6, 2100)
    logits[0, 5], logits[1, 2099], logits[2], logits[3, 7] = math.nan, math.inf, math.nan, -math.inf
    logits[4, 9] = logits[5, 11] = 50.0
    wishes = [wish(), wish(top_p=0.5), wish(top_k=3), wish(temperature=0.0), wish(), wish(top_p=0.5)]
    device_logits, jobs = logits.to(device), jobs_of(wishes, [0.5] * 6, device)
    tokens = torch.tensor([-1, -1, -1, -1, 3, 3], dtype=torch.int32, device=device)
    kernels.draw(device_logits, jobs, True, DrawSpace(6, 2100, 64, device), tokens)
    assert tokens.tolist() == [-1, -1, -1, -1, 9, 11]


def test_more_candidates_than_there_is_room_for(device: torch.device) -> None:
    """Exactly as many candidates as fit are sampled from; with one more, the CPU must sample. Other rows of the batch
    are unaffected."""
    logits = torch.zeros(3, 64)
    logits[1] = torch.where(torch.arange(64) < 33, 0.0, -90.0)
    logits[2] = torch.where(torch.arange(64) < 32, 0.0, -90.0)
    got = drawn(logits, [wish(min_p=0.9)] * 3, [0.99] * 3, device, most_kept=32)
    assert got == [TOO_MANY, TOO_MANY, 31]


def test_distribution(rng: torch.Generator, device: torch.device, sampled: bool) -> None:
    """Chi-square over 12 tokens: 11 degrees of freedom, 44 is exceeded once in 100 000."""
    draws, logits = 4000 if device.type == "cuda" else 100 if sampled else 250, rand(rng, 12, dtype=torch.float32) * 1.5
    for cut in ({"temperature": 1.3}, {"temperature": 0.9, "top_p": 0.9, "top_k": 10}):
        s = wish(**cut)
        numbers = [Row(wish(i), [0], 1).uniform() for i in range(draws)]
        got = Counter(drawn(logits.expand(draws, -1), [s] * draws, numbers, device))
        want = Counter(defined(logits, s, (i + 0.5) / 4000) for i in range(4000))
        assert set(got) <= set(want)
        shares = {token: count / 4000 for token, count in want.items()}
        assert sum((got[t] - draws * p) ** 2 / (draws * p) for t, p in shares.items()) < 44


MIXES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-4, 0.5, 1.0, 2.5, 100.0]),
        "top_k": st.sampled_from([0, 1, 2, 33, 3000]),
        "top_p": st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(deadline=None, max_examples=examples(12))
@given(st.lists(MIXES, min_size=1, max_size=4), st.integers(0, 2**31), st.sampled_from([7, 300, 2100]),
       st.sampled_from([0.1, 3.0]))  # fmt: skip
def test_any_mix(device: torch.device, mixes: list[dict[str, Any]], seed: int, vocab: int, spread: float) -> None:
    logits = torch.randn(len(mixes), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    rows = [Row(wish(**mix), [0], 1) for mix in mixes]
    got = drawn(logits, [row.sampling for row in rows], [row.uniform() for row in rows], device)
    assert got == sample(logits, rows)


@pytest.mark.gpu
def test_whole_vocabularies(rng: torch.Generator, device: torch.device) -> None:
    """Thousands of candidates give the same result, whatever order they were collected in."""
    wide = ({"top_p": 0.999999}, {"min_p": 1e-30})  # nearly all tokens are candidates
    cuts = [cut for cut in CUTS if cut not in wide and cut.get("temperature") != 0.0]
    wishes = [wish(seed, **cut) for seed in range(4) for cut in cuts]
    logits = rand(rng, len(wishes), 151_936, dtype=torch.float32) * 2.5
    numbers = [Row(s, [0], 1).uniform() for s in wishes]
    got = drawn(logits, wishes, numbers, device, most_kept=1 << 16)
    assert got == [defined(*row) for row in zip(logits, wishes, numbers, strict=True)]
    assert all(drawn(logits, wishes, numbers, device, most_kept=1 << 16) == got for _ in range(5))


def test_a_space_of_another_size_is_refused(device: torch.device) -> None:
    jobs = jobs_of([wish()] * 2, [0.5] * 2, device)
    tokens = torch.zeros(2, dtype=torch.int32, device=device)
    for space in (DrawSpace(1, 50, 8, device), DrawSpace(2, 51, 8, device)):
        with pytest.raises(ValueError, match="do not fit a space"):
            kernels.draw(torch.zeros(2, 50, device=device), jobs, False, space, tokens)
